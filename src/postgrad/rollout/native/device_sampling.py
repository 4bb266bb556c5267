"""Token choice on the device, after the forward pass of decoder.py.

Each row has its own temperature, top-k, top-p and min-p, in the decoder's sampling table.
"""

import math
from typing import Protocol

import torch
import triton
from torch import Tensor

from postgrad.rollout.native import kernels
from postgrad.rollout.native.sampling import MAX_TOP_LOGPROBS, filter_rows
from postgrad.rollout.native.tables import (
    INVERSE_TEMPERATURE,
    MIN_P,
    NUM_OWN,
    SAMPLING_FIELDS,
    SLOT,
    STEPS_PER_SYNC,
    TOP_K,
    TOP_P,
    BufferSizes,
)

VOCABULARY_BLOCK = 4096
FILTERED_ROWS = 64  # rows whose probabilities are sorted at the same time


class SamplingBuffers(Protocol):
    """The part of decoder.Decoder that token choice reads and writes."""

    sizes: BufferSizes
    state: Tensor
    sampling: Tensor
    uniforms: Tensor
    tokens: Tensor
    logprobs: Tensor
    stop_ids: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def sample(
    decoder: SamplingBuffers, logits: Tensor, filters: bool = False, tops: bool = False
) -> None:
    """Sample one token per row that has not ended; updates the decoder's state.

    Args:
        decoder: has the buffers.
        logits: (rows, vocabulary); filters overwrite them.
        filters, tops: see Decoder.run.
    """
    rows, vocabulary = logits.shape
    if tops:
        record_tops(decoder, logits)
    # Log-probs are those of the unfiltered distribution.
    unfiltered_lse = filter_logits(decoder, logits) if filters else logits
    num_blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    block_tops = logits.new_empty(rows, num_blocks)
    sums = logits.new_empty(rows, num_blocks)
    argmaxes = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    kernels.summarize_blocks[(rows, num_blocks)](
        logits, block_tops, sums, argmaxes, decoder.state, decoder.sizes.rows, decoder.sampling,
        vocabulary, num_blocks, SAMPLING_FIELDS=SAMPLING_FIELDS, BLOCK=VOCABULARY_BLOCK,
    )  # fmt: skip
    kernels.sample_token[(rows,)](
        logits, block_tops, sums, argmaxes, unfiltered_lse, decoder.state, decoder.sizes.rows,
        decoder.sampling, decoder.uniforms, decoder.tokens, decoder.logprobs, decoder.stop_ids,
        len(decoder.stop_ids), decoder.sizes.length, vocabulary, num_blocks, FILTERED=filters,
        SAMPLING_FIELDS=SAMPLING_FIELDS, BLOCK=VOCABULARY_BLOCK,
        BLOCKS_WIDE=triton.next_power_of_2(num_blocks),
    )  # fmt: skip


def filter_logits(decoder: SamplingBuffers, logits: Tensor) -> Tensor:
    """Set what each row's top-k, top-p and min-p exclude to -inf, in place.

    Returns the log of the sum of exponentials (rows,) before that, at the row's temperature.
    """
    settings = _settings_of(decoder, len(logits))
    sums: list[Tensor] = []
    parts = zip(logits.split(FILTERED_ROWS), settings.split(FILTERED_ROWS), strict=True)
    for part, setting in parts:
        scaled = part * setting[:, INVERSE_TEMPERATURE, None]
        lse = scaled.logsumexp(-1)
        probs = (scaled - lse[:, None]).exp()
        kept = filter_rows(probs, setting[:, TOP_K], setting[:, TOP_P], setting[:, MIN_P])
        part.masked_fill_(kept == 0.0, -math.inf)
        sums.append(lse)
    return torch.cat(sums)


def record_tops(decoder: SamplingBuffers, logits: Tensor) -> None:
    """Keep the most likely next tokens of each row, with log-probs at its temperature."""
    rows, vocabulary = logits.shape
    inverse_temperature = _settings_of(decoder, rows)[:, INVERSE_TEMPERATURE, None]
    logprobs = (logits * inverse_temperature).log_softmax(-1)
    count = min(MAX_TOP_LOGPROBS, vocabulary)
    values, tokens = logprobs.topk(count)
    columns = torch.arange(rows, device=logits.device)
    places = decoder.state[NUM_OWN, :rows].long() % STEPS_PER_SYNC
    decoder.top_tokens[columns, places, :count] = tokens.int()
    decoder.top_logprobs[columns, places, :count] = values


def _settings_of(decoder: SamplingBuffers, rows: int) -> Tensor:
    """Return the sampling table (rows, SAMPLING_FIELDS) of rows; greedy ones have 1 for 0."""
    settings = decoder.sampling[decoder.state[SLOT, :rows].long()]
    inverse_temperature = settings[:, INVERSE_TEMPERATURE]
    inverse_temperature.masked_fill_(inverse_temperature == 0.0, 1.0)
    return settings
