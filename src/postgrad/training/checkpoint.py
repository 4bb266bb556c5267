"""Checkpoints: written aside, synced, renamed; `latest` moves last. A kill at any moment leaves the one before usable.

checkpoints/step-N/policy/  optimizer.safetensors  method.bin  state.json, and pending.bin where rollouts run ahead
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from postgrad.cluster.wire import decode, encode
from postgrad.errors import RunError
from postgrad.files import atomic_write_text, fsync_path, fsync_tree, temporary_path

# How safetensors tells of a full disk, a quota or a broken one; its error is of a kind of its own.
IO_ERROR = re.compile(r"I/O error: (.+?) \(os error|(No space left on device)")


class Savable(Protocol):
    """A trained model: writes and reads its own files under a checkpoint folder."""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...

    def begin_save(self, folder: str) -> None: ...

    def saved(self, wait: bool) -> bool: ...


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside the trained models."""

    step: int
    cursor: dict[str, Any]
    flat_steps: int
    method: dict[str, Any]
    pending: list[Any] = field(default_factory=list)  # rollouts sampled ahead of their steps


def save(
    folder: Path, models: Sequence[Savable], saved: Saved, keep: int, best: int | None = None
) -> Path:
    """Write checkpoint `saved.step` under the run folder and drop the oldest beyond `keep`, but never the one of step `best`."""
    final, aside = _places(folder, saved.step)
    with _whole_or_gone(final, aside):
        _begin(aside, saved)
        for model in models:
            model.save(str(aside.resolve()))
        _finish(final, aside, best)
    _drop(folder, saved.step, keep, best)
    return final


class Writer:
    """Writes a run's checkpoints: at once, or with `behind` while its next steps run, one at a time.

    `latest` moves when all of a checkpoint is on the disk, so a kill in between leaves the one before.
    """

    def __init__(
        self,
        folder: Path,
        models: Sequence[Savable],
        keep: int,
        behind: bool,
        told: Callable[[Path], None],
    ) -> None:
        self.folder, self.models, self.keep, self.behind, self.told = (
            folder,
            models,
            keep,
            behind,
            told,
        )
        self.open: tuple[int, int | None] | None = None  # step and best of what is being written

    def tidy(self, step: int, best: int | None) -> None:
        """Remove what a kill left of checkpoints: half-written ones, and those that were to go when step's was there."""
        for aside in (self.folder / "checkpoints").glob(".step-*"):
            shutil.rmtree(aside, ignore_errors=True)
        if step:
            _drop(self.folder, step, self.keep, best)

    def save(self, saved: Saved, best: int | None) -> None:
        if not self.behind:
            self.told(save(self.folder, self.models, saved, self.keep, best))
            return
        self.settle(wait=True)
        final, aside = _places(self.folder, saved.step)
        with _whole_or_gone(final, aside):
            _begin(aside, saved)
            for model in self.models:
                model.begin_save(str(aside.resolve()))
        self.open = saved.step, best

    def settle(self, wait: bool) -> None:
        """Let `latest` name what is written; with `wait` also what is still being written."""
        if self.open is None:
            return
        step, best = self.open
        final, aside = _places(self.folder, step)
        with _whole_or_gone(final, aside):
            if not all(model.saved(wait) for model in self.models):
                return
            self.open = None
            _finish(final, aside, best)
        _drop(self.folder, step, self.keep, best)
        self.told(final)


def _places(folder: Path, step: int) -> tuple[Path, Path]:
    final = folder / "checkpoints" / f"step-{step}"
    return final, temporary_path(final)


@contextmanager
def _whole_or_gone(final: Path, aside: Path) -> Iterator[None]:
    """A checkpoint that cannot be written leaves nothing behind, and its error says so."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"checkpoint {final} could not be written: {error.strerror or error}; earlier checkpoints are whole"
        ) from error
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if found := IO_ERROR.search(str(error)):
            raise RunError(
                f"checkpoint {final} could not be written: {found[1] or found[2]}; earlier checkpoints are whole"
            ) from error
        if isinstance(error, RunError):
            raise RunError(f"checkpoint {final}: {error}; earlier checkpoints are whole") from error
        raise


def _begin(aside: Path, saved: Saved) -> None:
    """What a checkpoint holds beside the models."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / "method.bin").write_bytes(encode(saved.method))
    if saved.pending:
        (aside / "pending.bin").write_bytes(encode(saved.pending))
    state = {"step": saved.step, "cursor": saved.cursor, "flat_steps": saved.flat_steps}
    (aside / "state.json").write_text(json.dumps(state, indent=1) + "\n")


def _finish(final: Path, aside: Path, best: int | None) -> None:
    root = final.parent
    fsync_tree(aside)
    shutil.rmtree(
        final, ignore_errors=True
    )  # left by a run that was killed after this rename and went on from an older one
    aside.rename(final)
    if best is None:
        (root / "best").unlink(missing_ok=True)
    else:
        atomic_write_text(root / "best", f"step-{best}\n")
    atomic_write_text(root / "latest", f"{final.name}\n")
    fsync_path(root)


def _drop(folder: Path, step: int, keep: int, best: int | None) -> None:
    root = folder / "checkpoints"
    # A newer one was left by a run that was killed before `latest` moved; it goes too, or it would push out the one just saved.
    kept = [path for path in _ordered(root) if _number(path) <= step][-keep:]
    for other in set(_ordered(root)) - {*kept, root / f"step-{best}"}:
        shutil.rmtree(other, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return _pointed(folder, "latest")


def to_continue(folder: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint a run goes on from: the latest or, where somebody removed that one, the newest that is there."""
    root = folder / "checkpoints"
    named = (root / "latest").read_text().strip() if (root / "latest").is_file() else ""
    whole = [path for path in _ordered(root) if (path / "state.json").is_file()]
    if not named or root / named in whole:
        return root / named if named else None
    if not whole:
        raise RunError(
            f"{root}/latest names {named}, which is not there, and there is no other; remove {root} to start again"
        )
    note(f"{root}/latest names {named}, which is not there; going on from {whole[-1].name}")
    return whole[-1]


def best(folder: Path) -> Path | None:
    """The checkpoint that training.keep_best keeps, or None."""
    return _pointed(folder, "best")


def _pointed(folder: Path, name: str) -> Path | None:
    pointer = folder / "checkpoints" / name
    if not pointer.is_file():
        return None
    found = folder / "checkpoints" / pointer.read_text().strip()
    if not (found / "state.json").is_file():
        raise RunError(
            f"{pointer} names {found.name}, which is not there; point it at one of the others or remove it to start again"
        )
    return found


def load(checkpoint: Path, models: Sequence[Savable]) -> Saved:
    """Put the models where the checkpoint was and return the rest."""
    try:
        for model in models:
            model.load(str(checkpoint.resolve()))
        state = json.loads((checkpoint / "state.json").read_text())
        pending = checkpoint / "pending.bin"
        ahead = decode(pending.read_bytes()) if pending.is_file() else []
        method = decode((checkpoint / "method.bin").read_bytes())
        return Saved(state["step"], state["cursor"], state["flat_steps"], method, ahead)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}: {error}); if it is damaged, remove that folder, "
            "and the same command continues from the one before"
        ) from error
    except RunError as error:  # of a model in another process
        raise RunError(f"checkpoint {checkpoint} cannot be read: {error}") from error


def _ordered(root: Path) -> list[Path]:
    return sorted(
        (path for path in root.glob("step-*") if path.name.removeprefix("step-").isdigit()),
        key=_number,
    )


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
