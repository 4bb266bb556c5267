"""Splits a response into its thought (chain of thought) and its final output.

The thought is given as tokens, for masks, and as text, for a classmate or a judge that reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from postgrad.data.thought_spans import Span, keep, keep_words, split_cot, split_text

if TYPE_CHECKING:
    from postgrad.types import Batch


class Text(Protocol):
    """Encodes and decodes text with the tokenizer of the model that wrote the response."""

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_raw(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Thought:
    """The thought of a response: tokens [start, end) and their text.

    `output` is the text of the final output, which starts at token `output_start`. A thought that
    was never closed has no output: `output` is None and `output_start` is the response's length.
    """

    response: list[int]
    start: int
    end: int
    text: str
    output_start: int
    output: str | None

    @property
    def closed(self) -> bool:
        """Whether the end marker was written."""
        return self.output is not None


class ThoughtSplitter:
    """Finds thoughts between two markers.

    Without an end marker, the whole response is both the thought and the output.

    Args:
        text: encodes and decodes text.
        start: the marker that opens a thought; "" if a thought starts with the response.
        end: the marker that closes it.
    """

    def __init__(self, text: Text, start: str, end: str) -> None:
        self.text = text
        self.start = start
        self.end = end
        self.start_ids = text.encode_response(start, with_end=False)
        self.end_ids = text.encode_response(end, with_end=False)
        self._token_texts: dict[int, str] = {}

    def split_batch(self, batch: "Batch") -> list[Thought]:
        """Return the thought of every row."""
        prompts = [ids.tolist() for ids in batch.prompt.split()]
        responses = [ids.tolist() for ids in batch.response.split()]
        stopped = [finish == "stop" for finish in batch.rows["finish"]]
        return [self.split(*row) for row in zip(prompts, responses, stopped, strict=True)]

    def split(self, prompt: Sequence[int], response: list[int], stopped: bool) -> Thought:
        """Return the thought of one response.

        Args:
            prompt: token ids of the prompt, which may have opened the thought.
            response: token ids of the response.
            stopped: the last token ends the response and is not part of its text.
        """
        length = len(response) - stopped
        if not self.end:
            text = self.text.decode(response[:length])
            return Thought(response, 0, length, text, 0, text)
        span = self._find_span(prompt, response[:length])
        text = span.lead + self.text.decode(response[span.start : span.end]) + span.tail
        if span.output is None:
            return Thought(response, span.start, span.end, text, len(response), None)
        output = span.rest + self.text.decode(response[span.output : length])
        return Thought(response, span.start, span.end, text, span.output, output)

    def _find_span(self, prompt: Sequence[int], ids: Sequence[int]) -> Span:
        opened = bool(self.start) and self.is_opened_by(prompt)
        span = split_cot(ids, len(ids), self.start_ids, self.end_ids, opened)
        start_is_missing = span.start == 0 and bool(self.start) and not opened
        if span.output is not None and not start_is_missing:
            return span
        # A marker may share a token with other text: search the text of the tokens too.
        token_texts = [self._token_text(i) for i in ids]
        by_text = split_text(token_texts, self.start, self.end, opened)
        is_closed_by_text = by_text.output is not None and span.output is None
        if is_closed_by_text or by_text.start > span.start:
            return by_text
        return span

    def is_opened_by(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends in the start marker, so that the response starts in a thought."""
        tail = self.text.decode_raw(prompt[-4 * len(self.start) - 8 :])
        return tail.rstrip().endswith(self.start.strip())

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.text.decode_raw([token])
        return self._token_texts[token]

    def truncate(self, thought: Thought, spec: str, unit: str) -> Thought:
        """Return the part of a thought that `spec` keeps; see thought_spans.keep.

        Args:
            thought: what to truncate.
            spec: a share, or first-K-tokens or last-K-tokens.
            unit: whether a share counts `tokens` or `words`.
        """
        if unit == "words":
            return self._truncate_words(thought, float(spec))
        start, end = keep(thought.start, thought.end, spec)
        if (start, end) == (thought.start, thought.end):
            return thought
        text = self.text.decode(thought.response[start:end])
        return replace(thought, start=start, end=end, text=text)

    def _truncate_words(self, thought: Thought, share: float) -> Thought:
        """End at the first token after which the decoded text holds all words that are kept."""
        text = keep_words(thought.text, share)
        first = thought.start
        lead = thought.text.find(self.text.decode(thought.response[first : thought.end]))
        num_characters = len(text) - lead
        for end in range(first, thought.end + 1):
            if len(self.text.decode(thought.response[first:end])) >= num_characters:
                return replace(thought, end=end, text=text)
        return replace(thought, text=text)
