"""Token ids as text while they come: no half characters, and nothing that may turn out to belong to a stop string."""

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what bytes that are not yet a character decode to


class TextStream:
    """The text of one row, piece by piece; the pieces together are the text of the whole row.

    Args:
        tokenizer: a transformers tokenizer.
        stops: strings that end the row. The text ends before them, unless `keep_stop`.
        keep_special: whether special tokens are shown. The stop token never is, unless `keep_stop`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        keep_special: bool = False,
        keep_stop: bool = False,
    ) -> None:
        self.tokenizer, self.stops, self.keep_special, self.keep_stop = (
            tokenizer,
            tuple(stops),
            keep_special,
            keep_stop,
        )
        self.ids: list[int] = []
        self.before = self.told = (
            0  # ids[told:] are not text yet; they are decoded together with ids[before:told]
        )
        self.text = ""
        self.sent = 0
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int], finish: str = "", end: bool = False) -> str:
        """The text that is sure now. `finish` ends the row; `end` says that its last token is a stop token."""
        self.ids += ids[:-1] if end and not self.keep_stop else ids
        known = self._decode(self.before, self.told)
        new = self._decode(self.before, len(self.ids))[len(known) :]
        if new and (finish or not new.endswith(BROKEN)):
            self.text += new
            self.before, self.told = self.told, len(self.ids)
        if finish == "stop" and not end:
            self._cut()
        sure = len(self.text) if finish else self._sure()
        piece, self.sent = self.text[self.sent : sure], max(self.sent, sure)
        return piece

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self.tokenizer.decode(
            self.ids[start:end],
            skip_special_tokens=not self.keep_special,
            clean_up_tokenization_spaces=False,
        )

    def _cut(self) -> None:
        """End the text with the first stop string, or before it."""
        found = [(at, -len(stop), stop) for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            at, _, self.stopped_by = min(found)
            self.text = self.text[: at + len(self.stopped_by) if self.keep_stop else at]

    def _sure(self) -> int:
        """How much of the text cannot be the beginning of a stop string."""
        if self.keep_stop:
            return len(self.text)
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return len(self.text) - length
        return len(self.text)
