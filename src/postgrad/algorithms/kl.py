"""KL to a reference policy: per-token estimators, the penalty inside the reward, and the controllers of its coefficient.

With x = logprobs - reference_logprobs on tokens sampled from the policy:

    k1   x                       unbiased, its gradient has mean 0: fine in a reward, no signal as a loss
    k2   x^2 / 2                 biased value, its mean gradient is exactly that of KL(policy || reference)
    k3   exp(-x) - 1 + x         unbiased, never negative; its mean gradient is that of KL(reference || policy), the other way round
    abs  |x|

A `+` after a name keeps the value and takes the gradient of k2 (straight through).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.algorithms.masked import row_mean
from postgrad.errors import ConfigError, did_you_mean

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """(tokens,) the estimate named by `estimator`, one of KL_ESTIMATORS. No gradient reaches the reference.

    k3 clamps -x to +-20 and its value to +-10, as verl does. Raises: ConfigError for an unknown name.
    """
    if estimator not in KL_ESTIMATORS:
        raise ConfigError(
            f"unknown KL estimator {estimator!r}; {did_you_mean(estimator, KL_ESTIMATORS)}"
        )
    x = logprobs - reference_logprobs.detach()
    k2 = x.square() / 2
    base = estimator.removesuffix("+")
    if base == "k1":
        value = x
    elif base == "k2":
        value = k2
    elif base == "abs":
        value = x.abs()
    else:
        negative = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)
    return value.detach() + (k2 - k2.detach()) if estimator.endswith("+") else value


def mean_kl(kl: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Scalar: the mean over rows with an unmasked token of the row's mean KL, for AdaptiveKl. 0 for an empty batch."""
    present = torch.zeros(num_rows, dtype=torch.bool, device=mask.device)
    present[rows[mask.bool()]] = True
    return row_mean(kl, mask, rows, num_rows).sum() / present.sum().clamp(min=1)


def kl_in_reward(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    coefficient: float,
    *,
    estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """((tokens,) r_t - coefficient · kl_t on unmasked tokens, (tokens,) kl_t): KL as a part of the reward. Both detached."""
    kl = kl_penalty(old_logprobs, reference_logprobs, estimator).detach()
    kl = torch.where(mask.bool(), kl, 0.0)
    return token_rewards - coefficient * kl, kl


@dataclass
class FixedKl:
    """A coefficient that stays."""

    coefficient: float = 0.001

    def update(self, kl: float, num_rows: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


@dataclass
class AdaptiveKl:
    """A coefficient that steers the measured KL towards `target`.

    After each step: coefficient *= 1 + clip(KL / target - 1, -0.2, 0.2) · num_rows / horizon, KL as in mean_kl. `state` belongs in
    the checkpoint (verl forgets it, so its coefficient starts over on resume).
    """

    coefficient: float = 0.001
    target: float = 0.1
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise ConfigError(
                f"adaptive KL needs a positive target and horizon; got target {self.target}, horizon {self.horizon}"
            )

    def update(self, kl: float, num_rows: int) -> None:
        """One step's measured KL over `num_rows` rows."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_rows / self.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
