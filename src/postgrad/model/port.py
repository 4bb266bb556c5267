"""The ports of a model that is trained or read, wherever it runs.

`Policy` gives log-probs and is updated, `Critic` gives values. A `View` says which policy inside a
model is meant, and `TokenOutputs` is what a loss sees of the current policy.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from postgrad.types import Batch


@dataclass(frozen=True)
class View:
    """`num_blocks` None is the full policy; n is the policy after the first n blocks, n >= 1."""

    num_blocks: int | None = None
    norm: str = "none"


FULL = View()


def after(num_blocks: int, norm: str = "none") -> View:
    """Return the view of the internal policy after `num_blocks` blocks."""
    return View(num_blocks, norm)


class TokenOutputs(NamedTuple):
    """Float32 values per token, (tokens,) each.

    The log-prob of the token (nats), and the entropy (nats) and the sum of squared probabilities
    of the distribution it was drawn from. If several targets per token were given, the log-probs
    are (tokens, targets).
    """

    logprobs: Tensor
    entropy: Tensor
    sum_squares: Tensor


class Policy(Protocol):
    """A model that computes log-probs and can be trained, in this process or another one."""

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        """Return (tokens,) `logprobs`, `entropy` and `sum_squares` of the response tokens.

        They are computed at the rollout temperature, without gradient. If the batch has
        `kept_ids`, they are of the distributions over the ids that sampling kept.
        """
        ...

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on the batch; return metrics.

        Takes `training.updates_per_step` optimizer steps in each of `training.ppo_epochs` passes.
        """
        ...

    def token_stats(self) -> dict[str, Tensor]:
        """Return (tokens,) statistics of the last update's batch from its own forward passes.

        The column is `entropy`. Rows that the update left out hold NaN.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in the compute type, by parameter name."""
        ...

    def save(self, folder: str) -> None:
        """Write `policy/`, a stock Hugging Face folder, and the optimizer's state to `folder`."""
        ...

    def load(self, folder: str) -> None:
        """Continue from what save() wrote."""
        ...


class Critic(Protocol):
    """A value model, in this process or another one. Saving works as in Policy."""

    def values(self, batch: Batch) -> Tensor:
        """Return (tokens,) the value before each response token, without gradient."""
        ...

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train towards the batch's returns; return metrics."""
        ...

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...
