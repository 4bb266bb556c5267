"""Sizes, lines and columns of the tables that the decode step reads and writes. Needs no GPU."""

from typing import NamedTuple

STEPS_PER_SYNC = 16  # decode steps after which the host reads the state of the rows
PREFILL_ROWS = 128  # of the step that computes prompts token by token

# Lines of the state table (FIELDS, rows), one column per row; kernels.py has the same numbers.
TOKEN = 0  # the last token
NUM_OWN = 1  # this turn's tokens in the row's own pages: the prompt's last one and the response
NUM_SHARED = 2  # prompt tokens in pages that the prompt's rows share
SHARED_PAGES = 3  # number of these pages
SLOT = 4  # the line of `tokens`, `logprobs` and `uniforms` that belongs to the row
LIMIT = 5  # largest number of response tokens
ALIVE = 6  # 0: the row has ended
NUM_EARLIER = 7  # tokens in the row's own pages before those of this turn
ROTARY_OFFSET = 8  # what a rotary position after pictures has more than its place in the row
FIELDS = 9

# Columns of the sampling table (slots, SAMPLING_FIELDS); kernels.py reads the first.
INVERSE_TEMPERATURE = 0  # 0: greedy
TOP_K = 1
TOP_P = 2
MIN_P = 3
SAMPLING_FIELDS = 4


class BufferSizes(NamedTuple):
    """Sizes of the decoder's buffers."""

    rows: int  # that decode at the same time
    row_pages: int  # per row
    slots: int  # rows with sampling parameters, random numbers and results
    length: int  # response tokens per slot; token n is at place n % length
    positions: int  # of the rotary tables
    pages: int  # in total
