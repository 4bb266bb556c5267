"""Where a step's rollouts come from: sampled in the step, ahead of it, or by a stream."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods.method import Method
from postgrad.methods.step import Stage, Step
from postgrad.training.prefetch import RolloutPrefetcher
from postgrad.types import Batch


class Rollouts(Protocol):
    """Runs the sampling stages of steps, and keeps the rollouts of later steps."""

    def next_step(self, number: int) -> tuple[Step, Batch]:
        """Return the step and its rollouts: sampled now, or earlier."""
        ...

    def pausing(self, stage: Stage, step: Step) -> AbstractContextManager[None]:
        """Sample nothing while a learning stage changes the engine's weights."""
        ...

    def state(self) -> list[Any]:
        """Return what no step trained on yet, for the checkpoint."""
        ...

    def load(self, state: list[Any]) -> None:
        """Take the rollouts of a checkpoint."""
        ...

    def close(self) -> None:
        """Stop sampling."""
        ...


def make_rollouts(config: Config, method: Method, feed: Feed) -> Rollouts:
    """Return the rollouts of a run: a stream with rollout.stream, otherwise step by step."""
    if config.rollout.stream:
        from postgrad.training.stream import RolloutStream

        return RolloutStream(config, method, feed)
    return RolloutPrefetcher(config, method, feed)
