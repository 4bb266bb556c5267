"""Where the thought (chain of thought) of a response is, and which part of it is kept.

Spans are token positions [start, end) in the response. The markers belong to no span.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from postgrad.errors import Conflict, WrongValue

FIRST_OR_LAST = re.compile(r"(first|last)-(\d+)-tokens")


@dataclass(frozen=True)
class Span:
    """The tokens of a thought and the start of the final output.

    Attributes:
        start: first token of the thought.
        end: end of the thought (exclusive).
        output: first token of the final output; None if the thought was never closed.
        lead: first characters of the thought, if they share a token with the start marker.
        tail: last characters of the thought, if they share a token with the end marker.
        rest: first characters of the output, if they share a token with the end marker.
    """

    start: int
    end: int
    output: int | None = None
    lead: str = ""
    tail: str = ""
    rest: str = ""


def split_cot(
    ids: Sequence[int], length: int, start: Sequence[int], end: Sequence[int], opened: bool = False
) -> Span:
    """Find the thought in the first `length` token ids by the ids of its markers.

        start and end      between them                       output after end
        start, no end      after start, to the last token     no output
        no start, end      from the first token to end        output after end
        neither            everything                         no output

    Args:
        ids: token ids of the response.
        length: number of ids to read.
        start: token ids of the start marker.
        end: token ids of the end marker.
        opened: the prompt has opened the thought; a start marker in the response is part of it.
    """
    start_at = -1 if opened else find_ids(ids, start, 0, length)
    first = start_at + len(start) if start_at >= 0 else 0
    end_at = find_ids(ids, end, first, length)
    if end_at < 0:
        return Span(first, length)
    return Span(first, end_at, end_at + len(end))


def split_text(pieces: Sequence[str], start: str, end: str, opened: bool = False) -> Span:
    """As split_cot, by the text of each token: for markers that share a token with other text.

    Tokenizers merge characters: after "5" a model may write ".</" as one token, and a search for
    the ids of "</think>" does not find it.
    """
    text = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    starts = [0, *ends[:-1]]
    start_at = -1 if opened else text.find(start)
    begin = start_at + len(start) if start_at >= 0 else 0
    first = sum(position < begin for position in starts)
    lead = text[begin : ends[first - 1]] if first else ""
    end_at = text.find(end, begin)
    if end_at < 0:
        return Span(first, len(pieces), None, lead)
    output_at = end_at + len(end)
    last = sum(position <= end_at for position in ends)
    output = sum(position < output_at for position in starts)
    rest = text[output_at : ends[output - 1]]
    if last < first:  # both markers share one token, and the thought is inside it
        return Span(first, first, output, text[begin:end_at], "", rest)
    return Span(first, last, output, lead, text[starts[last] : end_at], rest)


def find_ids(ids: Sequence[int], pattern: Sequence[int], low: int, high: int) -> int:
    """Return the first position of `pattern` in ids[low:high], or -1; also for an empty pattern."""
    size = len(pattern)
    if not size:
        return -1
    for i in range(low, high - size + 1):
        if list(ids[i : i + size]) == list(pattern):
            return i
    return -1


def check_keep(spec: str, unit: str = "tokens") -> None:
    """Raise ConfigError unless `spec` is a valid method.keep.

    Valid are a share above 0 and at most 1, and with unit `tokens` also first-K-tokens and
    last-K-tokens.
    """
    match = FIRST_OR_LAST.fullmatch(spec)
    if match is not None and int(match[2]) > 0:
        if unit != "tokens":
            raise Conflict(
                f"method.keep={spec} counts tokens; use method.keep_unit=tokens, or a share"
            )
        return
    try:
        share = float(spec)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise WrongValue(
            f"method.keep={spec} is not a part of a thought; "
            "give a share such as 0.5 or 1, first-20-tokens or last-20-tokens"
        )


def keep(start: int, end: int, spec: str) -> tuple[int, int]:
    """Return the part of [start, end) that `spec` keeps.

    A share r keeps the first max(1, int(n * r)) of n tokens. K is limited to n.
    """
    count = end - start
    match = FIRST_OR_LAST.fullmatch(spec)
    if match is not None:
        num_kept = min(int(match[2]), count)
        return (start, start + num_kept) if match[1] == "first" else (end - num_kept, end)
    share = float(spec)
    if share == 1:
        return start, end
    return start, start + min(count, max(1, int(count * share)))


def keep_words(text: str, share: float) -> str:
    """Return the first int(n * share) of n words with the white space after them.

    All if that is 0.
    """
    ends = [match.end() for match in re.finditer(r"\S+\s*", text)]
    count = int(len(ends) * share)
    return text[: ends[count - 1]] if count else text


def draw_share(random: Random, low: float, high: float) -> float:
    """Return the share of one thought that random_truncate keeps."""
    return random.uniform(low, high)
