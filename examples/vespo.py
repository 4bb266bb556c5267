"""VESPO (2026), a policy loss in one file: a smooth weight of the response's ratio, no clip.

    postgrad train grpo method.loss=examples/vespo.py:vespo training.updates_per_step=4 \\
        model.path=MODEL data.train=FILE

`method.loss_options.decay_positive=2` sets an option. Expect policy/phi near 1 while the policy is
near the old one.
"""

import torch

from postgrad.algorithms.losses import MAX_LOG_RATIO, Loss, TokenLoss, log_ratio
from postgrad.algorithms.masked import row_sum

MIN_LOG_W = -18.420681  # log(1e-8)


def vespo(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    rows,
    num_rows,
    *,
    power_positive=2.0,
    decay_positive=3.0,
    power_negative=3.0,
    decay_negative=2.0,
):
    """Return -sg(phi) · A · logprobs, phi = w^power · exp(decay · (1 - w)), w = exp(sum_t d).

    w is the ratio of the whole response, its log clamped to log(1e-8) and 20, as in TRL. Power and
    decay are those of A >= 0 or A < 0. With method.correction=bypass w compares with the engine.
    """
    delta = log_ratio(logprobs, old_logprobs).detach()
    log_w = row_sum(delta, mask, rows, num_rows).clamp(MIN_LOG_W, MAX_LOG_RATIO)[rows]
    power = torch.where(advantages < 0, power_negative, power_positive).to(log_w)
    decay = torch.where(advantages < 0, decay_negative, decay_positive).to(log_w)
    phi = (power * log_w + decay * (1 - log_w.exp())).exp()
    metrics = {"policy_kl": (old_logprobs - logprobs).detach(), "phi": phi}
    return TokenLoss(-phi * advantages * logprobs, metrics)


# Declared so that rows whose advantages are all 0 are skipped, as with the built-in losses.
vespo_loss = Loss(
    vespo,
    reads=("logprobs", "old_logprobs", "advantages", "mask", "rows", "num_rows"),
    options=("power_positive", "decay_positive", "power_negative", "decay_negative"),
)
