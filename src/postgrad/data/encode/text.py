"""Texts become token ids and token ids texts, with the special tokens that the model expects."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from postgrad.errors import Missing, RunError
from postgrad.files import atomic_write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that a response is tokenized after, if a token would cover the prompt's end and its start.
NEUTRAL = ("\n", "a", "1", "=")


class TextEncoder:
    """A transformers tokenizer; it knows no messages and no chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Return the token ids of a text; `special` adds the tokenizer's BOS and EOS."""
        return list(cast(Any, self.tokenizer(text, add_special_tokens=special))["input_ids"])

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without a chat template: with BOS, without the added EOS."""
        ids = self.tokenize(text, special=True)
        bos = self.tokenizer.bos_token_id
        eos = self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the text has its own BOS
        adds_eos = eos is not None and ids[-1:] == [eos]
        if adds_eos and self.tokenize(text, special=False)[-1:] != [eos]:
            ids.pop()  # this tokenizer ends each text with EOS, but here a response follows
        return ids

    def encode_continuation(self, before: str, text: str) -> list[int]:
        """Return the ids of a text that follows another one, whose ids stay what they are alone.

        Tokenizers of SentencePiece start each text with a space. So both texts are tokenized at
        once. Where a token would cover the end of one and the start of the other, a neutral text
        takes the place of the first.
        """
        for context in (before, *NEUTRAL):
            start = self.tokenize(context, special=False)
            ids = self.tokenize(context + text, special=False)
            if ids[: len(start)] == start:
                return ids[len(start) :]
        return self.tokenize(text, special=False)

    def encode_response(self, text: str, with_end: bool = True) -> list[int]:
        """Return the ids of a response without special tokens; `with_end` adds one EOS."""
        ids = self.tokenize(text, special=False)
        return self.with_eos(ids) if with_end else ids

    def with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with one EOS at the end."""
        eos = self.eos_token_id()
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def eos_token_id(self) -> int:
        """Return the id of the end-of-sequence token. Raises ConfigError if there is none."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise Missing(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no end-of-sequence token; "
                "set its eos_token",
                at="eos_token",
            )
        return cast(int, eos)

    def without_special_tokens(self, text: str) -> str:
        """Return the text without special tokens that are written out in it, nested ones too."""
        special_tokens = [str(token) for token in self.tokenizer.all_special_tokens if token]
        pattern = "|".join(map(re.escape, special_tokens))
        while pattern and (shorter := re.sub(pattern, "", text)) != text:
            text = shorter
        return text

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return self._decode(ids, skip_special_tokens=False)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Return the text of a turn with special tokens, without the one that ended it."""
        is_ended = bool(ids) and ids[-1] in self._special_ids
        return self.decode_raw(ids[:-1] if is_ended else ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens, with all spaces as they are."""
        return self._decode(ids, skip_special_tokens=True)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def save(self, file: Path) -> None:
        """Write tokenizer.json, unless the file exists or the tokenizer is not a fast one.

        Raises:
            RunError: the file cannot be written.
        """
        if file.exists() or not self.tokenizer.is_fast:
            return
        try:
            atomic_write_text(file, cast(Any, self.tokenizer).backend_tokenizer.to_str())
        except OSError as error:
            raise RunError(f"{file} could not be written: {error.strerror}") from error
