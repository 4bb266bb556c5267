"""Cutting the thought out of a response, as tokens for the masks and as text for those who read it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from postgrad.data.thought_spans import Span, keep, keep_words, split_cot, split_text

if TYPE_CHECKING:
    from postgrad.types import Batch


class Text(Protocol):
    """The tokenizer's side of the model that thinks."""

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_raw(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Thought:
    """Tokens [start, end) of a response and their text. `output` is the text of the final output, from token `output_start` on.

    A thought that was never closed has no output: None, and an `output_start` at the end of the response.
    """

    response: list[int]
    start: int
    end: int
    text: str
    output_start: int
    output: str | None

    @property
    def closed(self) -> bool:
        return self.output is not None


class ThoughtSplitter:
    """Finds thoughts between two markers. Without an end marker a response is thought and output both.

    Args:
        text: the tokenizer's side of the model that thinks.
        start, end: the markers.
    """

    def __init__(self, text: Text, start: str, end: str) -> None:
        self.text, self.start, self.end = text, start, end
        self.start_ids, self.end_ids = (
            text.encode_response(marker, with_end=False) for marker in (start, end)
        )
        self._pieces: dict[int, str] = {}

    def split_batch(self, batch: "Batch") -> list[Thought]:
        """The thought of every row."""
        prompts, responses = (
            [ids.tolist() for ids in ragged.split()] for ragged in (batch.prompt, batch.response)
        )
        stopped = [finish == "stop" for finish in batch.rows["finish"]]
        return [self.split(*row) for row in zip(prompts, responses, stopped, strict=True)]

    def split(self, prompt: Sequence[int], response: list[int], stopped: bool) -> Thought:
        """The thought of one response; `stopped`: its last token is the end of the response, not a part of it."""
        length = len(response) - stopped
        if not self.end:
            text = self.text.decode(response[:length])
            return Thought(response, 0, length, text, 0, text)
        span = self._span(prompt, response[:length])
        text = span.lead + self.text.decode(response[span.start : span.end]) + span.tail
        if span.output is None:
            return Thought(response, span.start, span.end, text, len(response), None)
        output = span.rest + self.text.decode(response[span.output : length])
        return Thought(response, span.start, span.end, text, span.output, output)

    def _span(self, prompt: Sequence[int], ids: Sequence[int]) -> Span:
        opened = bool(self.start) and self.opens(prompt)
        span = split_cot(ids, len(ids), self.start_ids, self.end_ids, opened)
        if span.output is None or (
            span.start == 0 and self.start and not opened
        ):  # a marker may share tokens with other text
            found = split_text([self._piece(i) for i in ids], self.start, self.end, opened)
            if (found.output is not None) > (span.output is not None) or found.start > span.start:
                return found
        return span

    def opens(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends in the start marker, so that the response begins inside the thought."""
        return (
            self.text.decode_raw(prompt[-4 * len(self.start) - 8 :])
            .rstrip()
            .endswith(self.start.strip())
        )

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.text.decode_raw([token])
        return self._pieces[token]

    def truncate(self, thought: Thought, spec: str, unit: str) -> Thought:
        """What is left of a thought by `spec` (thought_spans.keep), a share counted in tokens or in words."""
        response, first = thought.response, thought.start
        if unit == "words":
            text = keep_words(thought.text, float(spec))
            # The shortest run of tokens that holds the text; its end may lie inside the last of them.
            needed = len(text) - thought.text.find(self.text.decode(response[first : thought.end]))
            longer = (
                n
                for n in range(first, thought.end + 1)
                if len(self.text.decode(response[first:n])) >= needed
            )
            return replace(thought, end=next(longer, thought.end), text=text)
        start, end = keep(first, thought.end, spec)
        if (start, end) == (first, thought.end):
            return thought
        return replace(thought, start=start, end=end, text=self.text.decode(response[start:end]))
