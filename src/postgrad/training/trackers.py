"""`track=wandb|tensorboard|trackio`: the metrics of a run once more, where a team already looks. The run folder stays the truth."""

import dataclasses
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.training.report import Reporter
from postgrad.types import Batch

# What a mirror does with one step's metrics, and how it ends.
Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


def check(config: Config) -> None:
    """Refuse a mirror whose package is not there, before anything is written."""
    if config.track and importlib.util.find_spec(config.track) is None:
        raise ConfigError(
            f"track={config.track} needs the package {config.track}; pip install {config.track}, or pip install 'postgrad[track]'"
        )


def mirrors(config: Config) -> list[Reporter]:
    return [Mirror(config.track)] if config.track else []


class Mirror(Reporter):
    """Passes numbers on. One that cannot start stops the run at once; one that fails later is left out, and the run goes on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tracker: Tracker | None = None

    def started(self, folder: Path, config: Config, start: int) -> None:
        try:
            self.tracker = TRACKERS[self.kind](folder.resolve(), config, start)
        except Exception as error:  # each package has errors of its own
            raise RunError(
                f"track={self.kind} could not start: {' '.join(str(error).split())[:300]}"
            ) from error

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self._pass_on(
            int(metrics["step"]), {k: v for k, v in metrics.items() if k not in ("step", "time")}
        )

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self._pass_on(number, metrics)

    def stopped(self) -> None:
        if self.tracker is not None:
            self._guarded(self.tracker[1])

    def _pass_on(self, number: int, metrics: dict[str, float]) -> None:
        if self.tracker is not None:
            log = self.tracker[0]
            self._guarded(lambda: log(number, {k: float(v) for k, v in metrics.items()}))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.tracker = None
            print(
                f"track={self.kind} failed and is left out from now on ({type(error).__name__}: {error}); the run goes on",
                flush=True,
            )


def wandb(folder: Path, config: Config, start: int) -> Tracker:
    """Online, or offline under runs/NAME/wandb with WANDB_MODE=offline; `wandb sync` sends such a folder later."""
    import wandb

    identity = hashlib.blake2b(
        str(folder).encode(), digest_size=8
    ).hexdigest()  # a run that goes on is the same run there
    run = wandb.init(
        project="postgrad",
        name=config.name,
        id=identity,
        resume="allow",
        dir=str(folder),
        config=dataclasses.asdict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("*", step_metric="step")

    def finish() -> None:
        run.finish()
        if run.offline:  # nothing was sent: say how
            print(
                f"to send this run to Weights & Biases: wandb sync {Path(run.dir).parent}",
                flush=True,
            )

    return (lambda number, metrics: run.log({"step": number, **metrics})), finish


def tensorboard(folder: Path, config: Config, start: int) -> Tracker:
    """Event files under runs/NAME/tensorboard; what a killed run wrote after its checkpoint is purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else 0)

    def log(number: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return log, writer.close


def trackio(folder: Path, config: Config, start: int) -> Tracker:
    """Trackio's own store on this machine (TRACKIO_DIR moves it); `trackio show` opens it."""
    import trackio

    trackio.init(
        project="postgrad",
        name=config.name.replace("/", "-"),
        config=dataclasses.asdict(config),
        resume="allow",
        embed=False,
    )
    return (lambda number, metrics: trackio.log(metrics, step=number)), trackio.finish


TRACKERS: dict[str, Callable[[Path, Config, int], Tracker]] = {
    "wandb": wandb,
    "tensorboard": tensorboard,
    "trackio": trackio,
}
