"""`track=wandb,tensorboard,file.py:Class`: send the metrics of a run to these trackers as well.

The run folder stays the source of truth. A user's class is called as Class(folder, config, start),
with `start` the step that the run continues from, 0 for a new run. It has log(step, metrics) and
finish(), and may have `last_step`: the last step of this run that it has from before a kill.
"""

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from postgrad.config.schema import Config
from postgrad.errors import NotInstalled, RunError
from postgrad.files import atomic_write_text
from postgrad.machine import is_installed
from postgrad.phases import print_line
from postgrad.training.report import Reporter
from postgrad.types import Batch
from postgrad.user_code import is_path, load_object


class Tracker(Protocol):
    """A started tracker. `last_step` may be missing: it has no step of an earlier process."""

    def __init__(self, folder: Path, config: Config, start: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


def check_tracker(config: Config) -> None:
    """Raise ConfigError if a tracker's package is not installed, or its class is not found."""
    for path in filter(is_path, config.track):
        _load_class(path)
    missing = [name for name in config.track if not is_path(name) and not is_installed(name)]
    if missing:
        noun = "package" if len(missing) == 1 else "packages"
        raise NotInstalled(
            f"track={','.join(config.track)} needs the {noun} {' and '.join(missing)}; "
            f"pip install {' '.join(missing)}, or pip install 'postgrad[track]'"
        )


def tracker_reporters(config: Config) -> list[Reporter]:
    """Return one reporter per tracker of `track`: if one fails, the others go on."""
    return [TrackerReporter(name) for name in config.track]


class TrackerReporter(Reporter):
    """Sends metrics to a tracker.

    A tracker that cannot start stops the run. One that fails later is dropped, and the run goes on.
    A run that was killed repeats the steps after its checkpoint: the tracker gets no step twice.
    It gets the validation of the last step that it has: the kill may have come before that.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tracker: Tracker | None = None
        self.last_step = -1  # of this run that the tracker has; it cannot replace its values

    def started(self, folder: Path, config: Config, start: int) -> None:
        try:
            kind = _load_class(self.kind) if is_path(self.kind) else TRACKERS[self.kind]
            self.tracker = kind(folder.resolve(), config, start)
        except Exception as error:  # each package has its own error types
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"track={self.kind} could not start: {reason}") from error
        self.last_step = getattr(self.tracker, "last_step", -1)
        if self.last_step > start:
            print_line(
                f"track={self.kind} has steps {start + 1} to {self.last_step} from before the kill "
                f"and keeps their values; it gets the steps after {self.last_step}"
            )

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        number = int(metrics["step"])
        if number > self.last_step:
            self._log(number, metrics)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        if number >= self.last_step:
            self._log(number, metrics)

    def stopped(self) -> None:
        if self.tracker is not None:
            self._call(self.tracker.finish)

    def _log(self, number: int, metrics: dict[str, float]) -> None:
        values = {name: float(metrics[name]) for name in metrics if name not in ("step", "time")}
        if (tracker := self.tracker) is not None:
            self._call(lambda: tracker.log(number, values))

    def _call(self, function: Callable[[], None]) -> None:
        """Call the tracker; drop it if it raises."""
        try:
            function()
        except Exception as error:
            self.tracker = None
            print_line(
                f"track={self.kind} failed and gets no more metrics "
                f"({type(error).__name__}: {error}); the run goes on"
            )


class Wandb:
    """Weights & Biases.

    WANDB_MODE=offline writes to runs/NAME/wandb; `wandb sync` sends that folder later.
    """

    def __init__(self, folder: Path, config: Config, start: int) -> None:
        import wandb

        self.run = wandb.init(
            project="postgrad",
            name=config.name,
            id=_wandb_id(folder, config, start),
            resume="allow",
            dir=str(folder),
            config=dataclasses.asdict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("*", step_metric="step")
        self.last_step = int(self.run.summary.get("step", -1))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def finish(self) -> None:
        self.run.finish()
        if self.run.offline:
            files = Path(self.run.dir).parent
            print_line(f"to send this run to Weights & Biases: wandb sync {files}")


def _wandb_id(folder: Path, config: Config, start: int) -> str:
    """Return the id with which a resumed run continues.

    A run from step 0 gets a new one, and so does a copy of a folder: it has another name.
    """
    file = folder / "wandb_id"
    run_id, _, name = file.read_text().partition(" ") if file.is_file() else ("", "", "")
    if not start or name != config.name or not run_id:
        run_id = uuid.uuid4().hex
    atomic_write_text(file, f"{run_id} {config.name}")
    return run_id


class TensorBoard:
    """Event files in runs/NAME/tensorboard.

    Steps that a killed run wrote after its last checkpoint are purged.
    """

    def __init__(self, folder: Path, config: Config, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = start + 1 if start else 0
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def _load_class(path: str) -> Any:
    return load_object(path, f"track={path}", _is_tracker, "class with log and finish")


def _is_tracker(value: Any) -> bool:
    return isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("log", "finish")
    )
