"""KL to a reference policy: estimators per token, the penalty in the reward, its coefficient.

With x = logprobs - reference_logprobs on tokens sampled from the policy:

    k1   x                       unbiased; mean gradient 0, so for rewards only
    k2   x^2 / 2                 biased; mean gradient is that of KL(policy || reference)
    k3   exp(-x) - 1 + x         unbiased, at least 0; mean gradient of KL(reference || policy)
    abs  |x|

A `+` after a name keeps the value and takes the gradient of k2 (straight through).
"""

import torch
from torch import Tensor

from postgrad.algorithms.masked import row_mean
from postgrad.errors import UnknownName, WrongValue, did_you_mean

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """(tokens,) the KL by `estimator`, one of KL_ESTIMATORS. No gradient reaches the reference.

    k3 clamps -x to +-20 and its value to +-10, as verl does. Raises ConfigError for another name.
    """
    if estimator not in KL_ESTIMATORS:
        raise UnknownName(
            f"unknown KL estimator {estimator!r}; {did_you_mean(estimator, KL_ESTIMATORS)}",
            at="estimator",
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
    """Scalar: the mean over rows of the row's mean KL, for adapt_kl_coef.

    Rows without an unmasked token do not count. An empty batch gives 0.
    """
    present = torch.zeros(num_rows, dtype=torch.bool, device=mask.device)
    present[rows[mask.bool()]] = True
    return row_mean(kl, mask, rows, num_rows).sum() / present.sum().clamp(min=1)


def kl_in_reward(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    coef: float,
    *,
    estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """Token rewards with the KL penalty, r_t - coef · kl_t, and kl_t itself.

    Both are (tokens,) and detached. Masked tokens have no penalty.
    """
    kl = kl_penalty(old_logprobs, reference_logprobs, estimator).detach()
    kl = torch.where(mask.bool(), kl, 0.0)
    return token_rewards - coef * kl, kl


def adapt_kl_coef(
    coef: float, kl: float, num_rows: int, *, target: float, horizon: float = 10000.0
) -> float:
    """Return the coefficient of the KL penalty for the next step, steered towards a KL of `target`.

        coef · (1 + clip(kl / target - 1, -0.2, 0.2) · num_rows / horizon)

    Args:
        coef: the coefficient of this step.
        kl: the KL of this step, as mean_kl measures it.
        num_rows: the rows of this step.

    Raises: ConfigError unless target and horizon are positive.
    """
    if not (target > 0 and horizon > 0):
        raise WrongValue(
            f"adaptive KL needs a positive target and horizon; got {target} and {horizon}",
            at="target",
        )
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_rows / horizon)
