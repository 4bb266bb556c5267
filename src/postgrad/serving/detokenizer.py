"""Token ids to text while they are sampled: no partial characters and no part of a stop string.

tokenizers' DecodeStream does the first half of this, but it raises an exception at byte-fallback
tokens that are not valid UTF-8, which a model may sample.
"""

import re
from collections.abc import Sequence
from typing import Any

BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
REPLACEMENT = "\ufffd"  # the decoded text of bytes that are not a complete character


class Detokenizer:
    """The text of one row, in pieces; the pieces together are the text of the row.

    Args:
        tokenizer: a transformers tokenizer.
        stops: strings that end the row. The text ends before them, unless `keep_stop`.
        keep_special: whether the text has special tokens. The stop token is only in it if
            `keep_stop`.
        keep_stop: whether the text has the stop string or stop token.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        keep_special: bool = False,
        keep_stop: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.keep_special = keep_special
        self.keep_stop = keep_stop
        self.ids: list[int] = []
        # ids[num_decoded:] are not in the text yet. They are decoded together with the ids from
        # context_start on, because a token's text depends on the tokens before it.
        self.context_start = 0
        self.num_decoded = 0
        self.text = ""
        self.num_sent = 0  # characters
        self.stopped_by: str | None = None  # the stop string that ended the row

    def push(self, ids: Sequence[int], finish: str = "", ends_with_stop_token: bool = False) -> str:
        """Add tokens and return the text that is now certain.

        Args:
            ids: new tokens.
            finish: `stop` or `length` if these are the last tokens.
            ends_with_stop_token: whether the last token is a stop token; if `finish` is `stop` and
                it is not, a stop string ended the row.
        """
        self.ids += ids[:-1] if ends_with_stop_token and not self.keep_stop else ids
        known = self._decode(self.context_start, self.num_decoded)
        new = self._decode(self.context_start, len(self.ids))[len(known) :]
        if new and (finish or not new.endswith(REPLACEMENT)):
            self.text += new
            self.context_start = self.num_decoded
            self.num_decoded = len(self.ids)
        if finish == "stop" and not ends_with_stop_token:
            self._cut_at_stop()
        end = len(self.text) if finish else self._certain_length()
        piece = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return piece

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self.tokenizer.decode(
            self.ids[start:end],
            skip_special_tokens=not self.keep_special,
            clean_up_tokenization_spaces=False,
        )

    def _cut_at_stop(self) -> None:
        """End the text before the first stop string, or after it if `keep_stop`.

        Of several that start at the same character, the longest counts.
        """
        candidates: list[tuple[int, int, str]] = []
        for stop in self.stops:
            start = self.text.find(stop)
            if start >= 0:
                candidates.append((start, -len(stop), stop))
        if candidates:
            start, _, stop = min(candidates)
            self.stopped_by = stop
            self.text = self.text[: start + len(stop) if self.keep_stop else start]

    def _certain_length(self) -> int:
        """Return how many characters cannot be the beginning of a stop string."""
        if self.keep_stop:
            return len(self.text)
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return len(self.text) - length
        return len(self.text)


def raw_bytes(name: str) -> bytes:
    """Return the bytes of a token from its name in the vocabulary; b"" if the name has no bytes.

    Byte-level tokenizers write each byte as one character, and byte fallback writes <0xE2>.
    """
    if BYTE_NAME.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    if all(character in BYTE_OF for character in name):
        return bytes(BYTE_OF[character] for character in name)
    return b""


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character that a byte-level tokenizer writes for it.

    Printable bytes of Latin-1 are their own characters. The others, in order, are those from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return found | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_characters()
