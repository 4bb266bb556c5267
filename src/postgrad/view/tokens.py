"""Token ids as the strings they stand for, with the run's own tokenizer.json. No torch, no transformers."""

import codecs
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.view.folder import NotFound
from postgrad.view.runs import Run

MOST_BYTES = 1 << 26
KEPT = 3


class Tokens:
    """The few tokenizers in use, loaded once each."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Pieces | None] = {}
        self._lock = threading.Lock()

    def of(self, run: Run) -> "Pieces | None":
        """The run's tokenizer, or None when it has none below the folder: the page then shows ids."""
        file = tokenizer_file(run)
        if file is None:
            return None
        key = (str(file), file.stat().st_mtime_ns)
        with self._lock:
            if key not in self._kept:
                while len(self._kept) >= KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = load(file)
            return self._kept[key]


def tokenizer_file(run: Run) -> Path | None:
    """In the newest checkpoint, in the run folder, or in the model the run started from, if that lies below the folder, too."""
    found, pointer = None, run.file("checkpoints", "latest")
    if pointer is not None and pointer.is_file():
        name = pointer.read_text()[:200].strip()
        found = (
            run.file("checkpoints", name, "policy", "tokenizer.json") if "/" not in name else None
        )
    found = found or run.file("tokenizer.json")
    if found is not None:
        return found
    model = run.config().get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(path, str) and path:
        try:
            return run.folder.checked(Path(path) / "tokenizer.json")
        except NotFound:
            return None
    return None


def load(file: Path) -> "Pieces | None":
    """A tokenizer that splits ids into texts; None when the file is not one."""
    from tokenizers import Tokenizer

    if file.stat().st_size > MOST_BYTES:
        return None
    try:
        return Pieces(Tokenizer.from_file(str(file)), json.loads(file.read_bytes()))
    except Exception:  # the library raises plain Exception for a file it cannot read
        return None


class Pieces:
    """Splits a sequence of ids into one text per token, so that the texts joined are the decoded whole."""

    def __init__(self, tokenizer: Any, spec: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.added = {int(t["id"]): str(t["content"]) for t in spec.get("added_tokens") or []}
        self.by_bytes = "ByteLevel" in json.dumps(spec.get("decoder") or {})
        self.table = byte_table() if self.by_bytes else {}

    def split(self, ids: Sequence[int]) -> list[str]:
        """A character whose bytes are spread over tokens belongs to the token that completes it."""
        return self._split_bytes(ids) if self.by_bytes else self._split_windows(ids)

    def _split_bytes(self, ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        out: list[str] = []
        for number in ids:
            if number in self.added:
                out.append(decoder.decode(b"", final=True) + self.added[number])
                decoder.reset()
                continue
            token = self.tokenizer.id_to_token(number)
            out.append(
                f"⟨{number}⟩"
                if token is None
                else decoder.decode(bytes(self.table.get(c, 63) for c in token))
            )
        if out:
            out[-1] += decoder.decode(b"", final=True)
        return out

    def _split_windows(self, ids: Sequence[int]) -> list[str]:
        """Decode a short window with and without the token: right also where a decoder joins pieces with spaces."""
        out: list[str] = []
        start, before = 0, ""
        for i in range(len(ids)):
            after = self.tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False)
            if after.endswith("�") and i + 1 < len(ids):
                out.append("")
                continue
            out.append(after[len(before) :] if after.startswith(before) else after)
            start = max(start, i - 3)
            before = self.tokenizer.decode(list(ids[start : i + 1]), skip_special_tokens=False)
        return out


def byte_table() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: those that are printable as themselves, the rest from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}
