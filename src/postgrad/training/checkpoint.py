"""Checkpoints: written to a temporary folder, synced, renamed; then `latest` is updated.

A kill at any moment leaves the previous checkpoint usable. The files of checkpoints/step-N/:
policy/, optimizer.safetensors, method.bin, state.json, and pending.bin if rollouts run ahead.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import Config, TrainingConfig
from postgrad.data.problem_queue import ProblemQueue
from postgrad.errors import RunError, Unsupported, WrongValue
from postgrad.files import (
    atomic_write_text,
    disk_error,
    fsync_path,
    fsync_tree,
    remove_folder,
    temporary_path,
)
from postgrad.methods.method import Method
from postgrad.training.guard import Guard
from postgrad.training.memory import explained_memory_errors
from postgrad.training.report import Reporter

if TYPE_CHECKING:
    from postgrad.training.rollouts import RolloutPrefetcher
    from postgrad.training.stream import RolloutStream


class Savable(Protocol):
    """A trained model that writes and reads its own files in a checkpoint folder."""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


@dataclass(frozen=True)
class State:
    """What a checkpoint holds besides the trained models."""

    step: int
    cursor: dict[str, Any]  # position in the training data
    flat_steps: int  # consecutive steps without a learning signal
    method: dict[str, Any]
    pending: list[Any] = field(default_factory=list)  # rollouts sampled for later steps
    lr: float | None = None  # peak learning rate, if it was changed during the run


def checkpoint_due(training: TrainingConfig, number: int) -> bool:
    """Whether step `number` gets a checkpoint: every checkpoint_every-th and the last."""
    return number == training.steps or number % training.checkpoint_every == 0


def remove_leftovers(folder: Path, step: int, keep: int, best: int | None) -> None:
    """Remove what a kill left: unfinished checkpoints, and those that `step` replaced."""
    for temporary in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(temporary, ignore_errors=True)
    if step:
        _remove_old(folder, step, keep, best)
        _point_to_best(folder / "checkpoints", best)


def save(
    folder: Path, models: Sequence[Savable], state: State, keep: int, best: int | None
) -> Path:
    """Write a checkpoint, make it the latest and return its folder. Raises RunError.

    If it cannot be written, earlier checkpoints stay intact. The newest `keep` checkpoints and the
    one of the best step stay, the others are removed.
    """
    final = _checkpoint_folder(folder, state.step)
    temporary = temporary_path(final)
    with _removed_on_error(final, temporary):
        _write_state(temporary, state)
        for model in models:
            model.save(str(temporary.resolve()))
        _commit(final, temporary, best)
    _remove_old(folder, state.step, keep, best)
    return final


class Progress:
    """Saves and restores what an open run continues from: models, method, position in the data.

    Attributes:
        saved: the step of the last checkpoint.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        folder: Path,
        reporter: Reporter,
        problem_queue: ProblemQueue,
        guard: Guard,
        rollouts: "RolloutPrefetcher | RolloutStream",
    ) -> None:
        self.config = config
        self.method = method
        self.folder = folder
        self.reporter = reporter
        self.problem_queue = problem_queue
        self.guard = guard
        self.rollouts = rollouts
        self.keep = config.training.keep_checkpoints
        self.saved = 0
        self.changed_lr: float | None = None

    def restore(self) -> int:
        """Load the latest checkpoint; return its step, or 0 if there is none."""
        found = latest(self.folder, self.reporter.note)
        if found is None:
            return 0
        state = load(found, self.method.saved_models())
        self.problem_queue.load(state.cursor)
        self.method.load(state.method)
        self.guard.flat_steps = state.flat_steps
        self.rollouts.load(state.pending)
        if state.lr is not None:
            self.set_lr(state.lr)
        self.method.sync_weights()
        self.saved = state.step
        return state.step

    def check_state(self) -> None:
        """Raise RunError if a checkpoint could not store what the method keeps between steps."""
        encode_method(self.method.state(), type(self.method).__name__)

    def save(self, number: int, best: int | None) -> None:
        """Write the checkpoint of step `number`; the one of step `best` is kept too."""
        state = State(
            step=number,
            cursor=self.problem_queue.state(),
            flat_steps=self.guard.flat_steps,
            method=self.method.state(),
            pending=self.rollouts.state(),
            lr=self.changed_lr,
        )
        with explained_memory_errors("save", self.method.ports.policy):
            path = save(self.folder, self.method.saved_models(), state, self.keep, best)
        self.reporter.saved(path)
        self.saved = number

    def set_lr(self, lr: float) -> None:
        """Change the peak learning rate from the next step on; checkpoints keep it.

        Raises ConfigError for anything but a number above 0, and if the models are in other
        processes, which have their own settings.
        """
        if self.config.cluster.backend != "local":
            raise Unsupported(
                "the learning rate can be changed during a run only with cluster.backend=local, "
                f"not {self.config.cluster.backend}; use optimizer.schedule",
                at="optimizer.lr",
            )
        if not isinstance(lr, Real) or isinstance(lr, bool):
            raise WrongValue(f"optimizer.lr={lr!r} is not a number; it must be above 0")
        if not lr > 0:
            raise WrongValue(f"optimizer.lr={lr} is out of range; it must be above 0")
        self.config.optimizer.lr = self.changed_lr = float(lr)


def latest(folder: Path, note: Callable[[str], object] = str) -> Path | None:
    """Return the checkpoint that a run continues from, or None for a new run.

    That is the one that `latest` names. If somebody removed it, it is the newest complete one, with
    a note. Raises RunError if there is none left.
    """
    pointer = folder / "checkpoints" / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_text(errors="replace").strip()[:100] or "nothing"
    if _is_complete(pointer.parent / name):
        return pointer.parent / name
    steps = saved_steps(folder)
    if not steps:
        raise RunError(
            f"{pointer} names {name}, which does not exist, and there is no other checkpoint; "
            f"remove {pointer.parent} to start again"
        )
    newest = _checkpoint_folder(folder, steps[-1])
    note(f"{pointer} names {name}, which does not exist; continuing from {newest.name}")
    return newest


def best(folder: Path) -> Path | None:
    """Return the checkpoint that training.keep_best keeps; None if there is none."""
    pointer = folder / "checkpoints" / "best"
    if not pointer.is_file():
        return None
    found = pointer.parent / pointer.read_text(errors="replace").strip()[:100]
    return found if _is_complete(found) else None


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the run's complete checkpoints, lowest first."""
    paths = _checkpoints_by_step(folder / "checkpoints")
    return [_step_of(path) for path in paths if _is_complete(path)]


def load(checkpoint: Path, models: Sequence[Savable]) -> State:
    """Load the models from a checkpoint and return the rest of it. Raises RunError."""
    try:
        for model in models:
            model.load(str(checkpoint.resolve()))
        state = json.loads((checkpoint / "state.json").read_text())
        pending = checkpoint / "pending.bin"
        return State(
            step=state["step"],
            cursor=state["cursor"],
            flat_steps=state["flat_steps"],
            method=decode((checkpoint / "method.bin").read_bytes()),
            pending=decode(pending.read_bytes()) if state["num_pending"] else [],
            lr=state.get("lr"),
        )
    except (OSError, LookupError, RecursionError, SafetensorError, TypeError, ValueError) as error:
        raise _unreadable(checkpoint, f"{type(error).__name__}: {error}") from error
    except RunError as error:  # a file is missing, or the model is in another process
        raise _unreadable(checkpoint, str(error)) from error


def changed_lr(folder: Path) -> float | None:
    """Return the learning rate that the latest checkpoint of a run restores; None: config's."""
    found = latest(folder)
    if found is None:
        return None
    try:
        return json.loads((found / "state.json").read_text()).get("lr")
    except (OSError, ValueError) as error:
        raise _unreadable(found, f"{type(error).__name__}: {error}") from error


def _unreadable(checkpoint: Path, reason: str) -> RunError:
    return RunError(
        f"checkpoint {checkpoint} cannot be read ({reason}); if it is damaged, remove that folder, "
        "and the same command continues from the one before"
    )


@contextmanager
def _removed_on_error(final: Path, temporary: Path) -> Iterator[None]:
    """Remove the temporary folder if the block fails; raise RunError for a refused write."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if reason := disk_error(error):
            message = f"checkpoint {final} could not be written: {reason}"
        elif isinstance(error, RunError):
            message = f"checkpoint {final}: {error}"
        else:
            raise
        raise RunError(f"{message}; earlier checkpoints are intact") from error


def encode_method(state: Any, class_name: str) -> bytes:
    """Return the result of a method's state() as bytes. Raises RunError if it has other types."""
    try:
        if not isinstance(state, dict):
            raise TypeError(f"{type(state).__name__} is not a dict")
        return encode(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{class_name}.state() cannot be stored in a checkpoint: {error}; it may hold numbers, "
            "texts, None, tensors, and lists and dicts of these, with texts as keys"
        ) from error


def _write_state(temporary: Path, state: State) -> None:
    """Create the temporary folder with everything but the models."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "method.bin").write_bytes(encode_method(state.method, "Method"))
    if state.pending:
        (temporary / "pending.bin").write_bytes(encode(state.pending))
    values: dict[str, Any] = {
        "step": state.step,
        "cursor": state.cursor,
        "flat_steps": state.flat_steps,
        "num_pending": len(state.pending),
    }
    if state.lr is not None:
        values["lr"] = state.lr
    (temporary / "state.json").write_text(json.dumps(values, indent=1) + "\n")


def _commit(final: Path, temporary: Path, best: int | None) -> None:
    """Sync and rename the temporary folder, then update `best` and `latest`."""
    root = final.parent
    fsync_tree(temporary)
    # A run killed after this rename, which then continued from an older checkpoint, left one.
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    _point_to_best(root, best)
    atomic_write_text(root / "latest", f"{final.name}\n")
    fsync_path(root)


def _point_to_best(root: Path, best: int | None) -> None:
    if best is None:
        (root / "best").unlink(missing_ok=True)
    else:
        atomic_write_text(root / "best", f"step-{best}\n")


def _remove_old(folder: Path, step: int, keep: int, best: int | None) -> None:
    """Remove all checkpoints but the newest `keep` up to `step` and the one of step `best`.

    Checkpoints after `step` go too: a run killed before it updated `latest` left them.
    """
    root = folder / "checkpoints"
    checkpoints = _checkpoints_by_step(root)
    kept = [path for path in checkpoints if _step_of(path) <= step][-keep:]
    for path in set(checkpoints) - {*kept, root / f"step-{best}"}:
        with suppress(OSError):
            remove_folder(path)


def _checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / "state.json").is_file()


def _checkpoints_by_step(root: Path) -> list[Path]:
    """Return the checkpoint folders, lowest step first; other names are ignored."""
    paths = [path for path in root.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(paths, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
