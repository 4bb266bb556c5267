"""`track=wandb,tensorboard,trackio`: sends the metrics of a run to these trackers as well.

The run folder stays the source of truth.
"""

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.files import atomic_write_text
from postgrad.packages import is_installed
from postgrad.training.report import Reporter, print_line
from postgrad.types import Batch


class Tracker(NamedTuple):
    """A started tracker.

    `last_step` is the last step of this run that the tracker has; it cannot replace its values.
    """

    log: Callable[[int, dict[str, float]], None]  # (step, metrics)
    finish: Callable[[], None]
    last_step: int = -1


def check_tracker(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    missing = [name for name in config.track if not is_installed(name)]
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
            self.tracker = TRACKERS[self.kind](folder.resolve(), config, start)
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


def trackio(folder: Path, config: Config, start: int) -> Tracker:
    """Start Trackio: its store on this machine (TRACKIO_DIR); `trackio show` opens it.

    A run from step 0 is a new run there, also if an earlier one has its name.
    """
    import trackio

    def init(resume: str) -> Any:
        return trackio.init(
            project="postgrad",
            name=config.name.replace("/", "-"),
            config=dataclasses.asdict(config),
            resume=resume,
            embed=False,
        )

    def log(number: int, metrics: dict[str, float]) -> None:
        trackio.log(metrics, step=number)

    # Trackio resumes the newest run of a name. Old versions have one run per name and no ids.
    file = folder / "trackio_id"
    run_id = _read_id(file, config)
    is_resumed = start > 0 and bool(run_id or not file.is_file())
    run = init("allow" if is_resumed else "never")
    # Trackio has no public name for the last step of a resumed run; old versions have none.
    last_step = getattr(run, "_next_step", 0) - 1 if is_resumed else -1
    if last_step >= 0 and run_id not in ("", getattr(run, "id", run_id)):
        trackio.finish()
        print_line(
            f"track=trackio has a newer run of the name {config.name}, from another folder; the "
            f"steps after {start} are a new run there"
        )
        run = init("never")
        last_step = -1
    _write_id(file, config, getattr(run, "id", "none"))
    return Tracker(log, trackio.finish, last_step)


TRACKERS: dict[str, Callable[[Path, Config, int], Tracker]] = {
    "wandb": wandb,
    "tensorboard": tensorboard,
    "trackio": trackio,
}
