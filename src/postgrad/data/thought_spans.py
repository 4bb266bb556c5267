"""The thought of a response (its chain of thought): where it lies among the tokens, and how much of it somebody else gets to see.

Spans are token positions [start, end), so that masks line up with the response; markers themselves belong to no span.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from postgrad.errors import ConfigError

FIRST_OR_LAST = re.compile(r"(first|last)-(\d+)-tokens")


@dataclass(frozen=True)
class Span:
    """The thought is [start, end); the final output begins at `output`, None when the thought was never closed.

    `lead` and `tail` are the thought's first and last characters where they share a token with a marker, `rest` the output's first.
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
    """Cut the thought out of the first `length` token ids by the ids of its markers.

        open and close     between them                       output after close
        open, no close     after open, to the end             no output
        no open, close     from the beginning to close        output after close
        neither            everything                         no output

    `opened`: the prompt has opened the thought already, so a start marker in the response is part of it.
    """
    at = -1 if opened else find(ids, start, 0, length)
    first = at + len(start) if at >= 0 else 0
    close = find(ids, end, first, length)
    return Span(first, length) if close < 0 else Span(first, close, close + len(end))


def split_text(pieces: Sequence[str], start: str, end: str, opened: bool = False) -> Span:
    """As split_cot, by the text of each token: for markers whose first or last character shares a token with other text.

    Tokenizers merge: after "5." a model may write ".</" as one token, which no search for the ids of "</think>" finds.
    """
    text = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    starts = [0, *ends[:-1]]
    at = -1 if opened else text.find(start)
    begin = at + len(start) if at >= 0 else 0
    first = sum(place < begin for place in starts)
    lead = text[begin : ends[first - 1]] if first else ""
    close = text.find(end, begin)
    if close < 0:
        return Span(first, len(pieces), None, lead)
    stop, last = close + len(end), sum(place <= close for place in ends)
    output = sum(place < stop for place in starts)
    rest = text[stop : ends[output - 1]]
    if last < first:  # both markers share a token, and what is between them lies in it
        return Span(first, first, output, text[begin:close], "", rest)
    return Span(first, last, output, lead, text[starts[last] : close], rest)


def find(ids: Sequence[int], wanted: Sequence[int], low: int, high: int) -> int:
    """Where `wanted` first lies in ids[low:high], or -1. Nothing wanted is found nowhere."""
    size = len(wanted)
    places = (i for i in range(low, high - size + 1) if list(ids[i : i + size]) == list(wanted))
    return next(places, -1) if size else -1


def check_keep(spec: str, unit: str = "tokens") -> None:
    """Raises ConfigError unless `spec` is a share above 0 and at most 1, or with the unit tokens also first-K-tokens or last-K-tokens."""
    if (match := FIRST_OR_LAST.fullmatch(spec)) is not None and int(match[2]) > 0:
        if unit != "tokens":
            raise ConfigError(
                f"method.keep={spec} counts tokens; use method.keep_unit=tokens, or a share"
            )
        return
    try:
        share = float(spec)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"method.keep={spec} is not how much of a thought to keep; give a share such as 0.5 or 1, first-20-tokens or last-20-tokens"
        )


def keep(start: int, end: int, spec: str) -> tuple[int, int]:
    """The part of [start, end) that is kept: a share r keeps the first max(1, int(n·r)) tokens; K is at most n."""
    count = end - start
    if (match := FIRST_OR_LAST.fullmatch(spec)) is not None:
        kept = min(int(match[2]), count)
        return (start, start + kept) if match[1] == "first" else (end - kept, end)
    share = float(spec)
    return start, end if share == 1 else start + min(count, max(1, int(count * share)))


def keep_words(text: str, share: float) -> str:
    """The first int(n·share) words with the white space after them; all of the text when that would be none."""
    ends = [match.end() for match in re.finditer(r"\S+\s*", text)]
    count = int(len(ends) * share)
    return text[: ends[count - 1]] if count else text


def draw_share(random: Random, low: float, high: float) -> float:
    """How much of one thought random_truncate keeps."""
    return random.uniform(low, high)
