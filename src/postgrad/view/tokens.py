"""Decodes token ids with a run's own tokenizer.json. Imports no torch and no transformers."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.view.folder import NotFound
from postgrad.view.reader import read_bytes
from postgrad.view.runs import Run

MAX_BYTES = 1 << 26  # of a tokenizer.json
MAX_NAME_BYTES = 1000  # of a checkpoint's name
UNKNOWN_BYTE = ord("?")


def find_tokenizer_file(run: Run) -> Path | None:
    """Return tokenizer.json of the newest checkpoint, of the run folder, or of the first model.

    The initial model counts only if it lies below the page's folder.
    """
    file = None
    latest = run.file("checkpoints", "latest")
    if latest is not None:
        name = read_bytes(latest, MAX_NAME_BYTES).decode(errors="replace").strip()
        if "/" not in name:
            file = run.file("checkpoints", name, "policy", "tokenizer.json")
    file = file or run.file("tokenizer.json")
    if file is not None:
        return file
    model = run.config().get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(path, str) and path:
        try:
            return run.folder.check(Path(path) / "tokenizer.json")
        except NotFound:
            return None
    return None


def load_decoder(file: Path) -> "TokenDecoder | None":
    """Return the decoder of a tokenizer.json; None if the file is not one, or is too large."""
    from tokenizers import Tokenizer

    try:
        content = read_bytes(file, MAX_BYTES)
        return TokenDecoder(Tokenizer.from_buffer(content), json.loads(content))
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return None


class TokenDecoder:
    """Decodes each token to its own text, so that the joined texts are the decoded sequence.

    Args:
        tokenizer: a tokenizers.Tokenizer.
        spec: the content of its tokenizer.json.
    """

    def __init__(self, tokenizer: Any, spec: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.added = {int(t["id"]): str(t["content"]) for t in spec.get("added_tokens") or []}
        self.is_byte_level = "ByteLevel" in json.dumps(spec.get("decoder") or {})
        self.byte_of = byte_table() if self.is_byte_level else {}

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """One text per token. A character of several tokens belongs to the last of them."""
        return self._decode_bytes(ids) if self.is_byte_level else self._decode_windows(ids)

    def _decode_bytes(self, ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts: list[str] = []
        for token_id in ids:
            if token_id in self.added:
                texts.append(decoder.decode(b"", final=True) + self.added[token_id])
                decoder.reset()
                continue
            token = self.tokenizer.id_to_token(token_id)
            if token is None:
                texts.append(f"⟨{token_id}⟩")
                continue
            data = bytes(self.byte_of.get(character, UNKNOWN_BYTE) for character in token)
            texts.append(decoder.decode(data))
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _decode_windows(self, ids: Sequence[int]) -> list[str]:
        """Decode a short window with and without each token; some decoders add spaces."""
        texts: list[str] = []
        start = 0
        before = ""
        for i in range(len(ids)):
            after = self._decode(ids[start : i + 1])
            if after.endswith("�") and i + 1 < len(ids):
                texts.append("")
                continue
            texts.append(after[len(before) :] if after.startswith(before) else after)
            start = max(start, i - 3)
            before = self._decode(ids[start : i + 1])
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def byte_table() -> dict[str, int]:
    """Character -> byte of byte-level BPE.

    Printable bytes are written as themselves, the others as characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
