"""`track=wandb,tensorboard,file.py:Class`: send the metrics of a run to these trackers as well.

The run folder stays the source of truth. A user's class is called as Class(folder, config, start),
with `start` the step that the run continues from, 0 for a new run. It has log(step, metrics) and
finish(), and may have `last_step`: the last step of this run that it has from before a kill.
"""

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.files import atomic_write_text
from postgrad.machine import is_installed
from postgrad.phases import print_line
from postgrad.training.report import Reporter
from postgrad.types import Batch
from postgrad.user_code import is_path, load_object


class Tracker(NamedTuple):
    """A started tracker.

    `last_step` is the last step of this run that the tracker has; it cannot replace its values.
    """

    log: Callable[[int, dict[str, float]], None]  # (step, metrics)
    finish: Callable[[], None]
    last_step: int = -1


def check_tracker(config: Config) -> None:
    """Raise ConfigError if a tracker's package is not installed, or its class is not found."""
    for path in filter(is_path, config.track):
        _load_class(path)
    missing = [name for name in config.track if not is_path(name) and not is_installed(name)]
    if missing:
        noun = "package" if len(missing) == 1 else "packages"
        raise ConfigError(
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

    def started(self, folder: Path, config: Config, start: int) -> None:
        try:
            make = _start_class(self.kind) if is_path(self.kind) else TRACKERS[self.kind]
            self.tracker = make(folder.resolve(), config, start)
        except Exception as error:  # each package has its own error types
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"track={self.kind} could not start: {reason}") from error
        last = self.tracker.last_step
        if last > start:
            print_line(
                f"track={self.kind} has steps {start + 1} to {last} from before the kill and keeps "
                f"their values; it gets the steps after {last}"
            )

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        values = {name: value for name, value in metrics.items() if name not in ("step", "time")}
        number = int(metrics["step"])
        if self.tracker is not None and number > self.tracker.last_step:
            self._send(self.tracker, number, values)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        if self.tracker is not None and number >= self.tracker.last_step:
            self._send(self.tracker, number, metrics)

    def stopped(self) -> None:
        if self.tracker is not None:
            self._call(self.tracker.finish)

    def _send(self, tracker: Tracker, number: int, metrics: dict[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
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


def wandb(folder: Path, config: Config, start: int) -> Tracker:
    """Start Weights & Biases.

    WANDB_MODE=offline writes to runs/NAME/wandb; `wandb sync` sends that folder later.
    """
    import wandb

    run = wandb.init(
        project="postgrad",
        name=config.name,
        id=_wandb_id(folder, config, start),
        resume="allow",
        dir=str(folder),
        config=dataclasses.asdict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("*", step_metric="step")

    def log(number: int, metrics: dict[str, float]) -> None:
        run.log({"step": number, **metrics})

    def finish() -> None:
        run.finish()
        if run.offline:
            files = Path(run.dir).parent
            print_line(f"to send this run to Weights & Biases: wandb sync {files}")

    return Tracker(log, finish, int(run.summary.get("step", -1)))


def _wandb_id(folder: Path, config: Config, start: int) -> str:
    """Return the id with which a resumed run continues; one from step 0 gets a new id."""
    file = folder / "wandb_id"
    run_id = (_read_id(file, config) if start else "") or uuid.uuid4().hex
    _write_id(file, config, run_id)
    return run_id


def _read_id(file: Path, config: Config) -> str:
    """Return the tracker's id of this run; "" if there is none, or if its folder is a copy."""
    if not file.is_file():
        return ""
    run_id, _, name = file.read_text().partition(" ")
    return run_id if name == config.name else ""


def _write_id(file: Path, config: Config, run_id: str) -> None:
    """Write the id with the run's name, which differs in a copy of the folder."""
    atomic_write_text(file, f"{run_id} {config.name}")


def tensorboard(folder: Path, config: Config, start: int) -> Tracker:
    """Start TensorBoard: event files in runs/NAME/tensorboard.

    Steps that a killed run wrote after its last checkpoint are purged.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else 0)

    def log(number: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return Tracker(log, writer.close)


def _start_class(path: str) -> Callable[[Path, Config, int], Tracker]:
    """Return a function that starts the user's tracker at `file.py:Class`."""
    made_class = _load_class(path)

    def start_tracker(folder: Path, config: Config, start: int) -> Tracker:
        made = made_class(folder, config, start)
        return Tracker(made.log, made.finish, getattr(made, "last_step", -1))

    return start_tracker


def _load_class(path: str) -> Any:
    return load_object(path, f"track={path}", _is_tracker, "class with log and finish")


def _is_tracker(value: Any) -> bool:
    return isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("log", "finish")
    )


TRACKERS: dict[str, Callable[[Path, Config, int], Tracker]] = {
    "wandb": wandb,
    "tensorboard": tensorboard,
}
