"""What a run continues from: it is written into checkpoints and read back from the latest one."""

from numbers import Real

from postgrad.data.feed import Feed
from postgrad.errors import ConfigError
from postgrad.training import checkpoint
from postgrad.training.guard import Guard
from postgrad.training.memory import explained_memory_errors
from postgrad.training.open import OpenRun
from postgrad.training.rollouts import Rollouts


class Progress:
    """Saves and restores the models, the method and the position in the data of an open run.

    Attributes:
        saved: the step of the last checkpoint.
    """

    def __init__(self, opened: OpenRun, feed: Feed, guard: Guard, rollouts: Rollouts) -> None:
        self.config = opened.run.config
        self.method = opened.run.method
        self.folder = opened.folder
        self.reporter = opened.reporter
        self.feed = feed
        self.guard = guard
        self.rollouts = rollouts
        self.writer = checkpoint.Writer(
            self.folder, self.method.saved_models(), self.config.training, self.reporter.saved
        )
        self.saved = 0
        self.changed_lr: float | None = None

    def restore(self) -> int:
        """Load the latest checkpoint; return its step, or 0 if there is none."""
        found = checkpoint.find_resumable(self.folder, self.reporter.note)
        if found is None:
            return 0
        state = checkpoint.load(found, self.method.saved_models())
        self.feed.load(state.cursor)
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
        checkpoint.encode_method(self.method.state(), type(self.method).__name__)

    def save(self, number: int, best: int | None) -> None:
        """Write the checkpoint of step `number`; the one of step `best` is kept too."""
        state = checkpoint.State(
            step=number,
            cursor=self.feed.state(),
            flat_steps=self.guard.flat_steps,
            method=self.method.state(),
            pending=self.rollouts.state(),
            lr=self.changed_lr,
        )
        with explained_memory_errors("save", self.method.ports.policy):
            self.writer.save(state, best)
        self.saved = number

    def set_lr(self, lr: float) -> None:
        """Change the peak learning rate from the next step on; checkpoints keep it.

        Raises ConfigError for anything but a number above 0, and if the models are in other
        processes, which have their own settings.
        """
        if self.config.cluster.backend != "local":
            raise ConfigError(
                "the learning rate can be changed during a run only with cluster.backend=local, "
                f"not {self.config.cluster.backend}; use optimizer.schedule"
            )
        if not isinstance(lr, Real) or isinstance(lr, bool):
            raise ConfigError(f"optimizer.lr={lr!r} is not a number; it must be above 0")
        if not lr > 0:
            raise ConfigError(f"optimizer.lr={lr} is out of range; it must be above 0")
        self.config.optimizer.lr = self.changed_lr = float(lr)
