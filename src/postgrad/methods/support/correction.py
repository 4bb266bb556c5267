"""Rollout correction: importance weights where engine and trainer give different probabilities.

Compares the engine's log-probs (`behavior_logprobs`) with the trainer's (`old_logprobs`). Weights
multiply the loss; rules mask tokens or rows whose ratio is out of bounds. It is off by default if
the engine samples from the trainer's own weights.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.correction import (
    geometric_row_weights,
    importance_weights,
    mismatch_metrics,
    reject,
)
from postgrad.algorithms.losses import Loss
from postgrad.errors import ConfigError, Missing
from postgrad.methods.method import Step
from postgrad.model.metrics import MetricAccumulator
from postgrad.rollout.engine import Engine
from postgrad.types import POLICY, Batch

CORRECTIONS = ("auto", "none", "token", "sequence", "geometric", "rejection", "bypass")
# Corrections without weights.
UNWEIGHTED = ("none", "rejection", "bypass")


def correction_on(settings: Any, engine: Engine) -> bool:
    """Whether this run corrects: if set, or with `auto` if the engine has its own weights."""
    if settings.correction == "auto":
        return not engine.shares_weights
    return settings.correction != "none"


def needs_trainer_logprobs(settings: Any, engine: Engine) -> bool:
    """Whether the correction compares with log-probs that the trainer computes before updates.

    `bypass` takes the engine's log-probs as the old ones and compares only for its rules.
    """
    if settings.correction == "bypass":
        return bool(settings.rejection)
    return correction_on(settings, engine)


def check_correction(config: Any) -> None:
    """Refuses malformed bounds and rules, and settings without effect. Raises ConfigError."""
    settings = config.method
    if settings.correction == "rejection" and not settings.rejection:
        raise Missing(
            "method.correction=rejection has no rules; "
            "add one, e.g. method.rejection.seq_mean_k1=0.999_1.001"
        )
    _check_bounds(settings)


def _check_bounds(settings: Any) -> None:
    """Parse the bounds on an empty batch. Raises ConfigError."""
    numbers = torch.zeros(0)
    mask = torch.zeros(0, dtype=torch.bool)
    rows = torch.zeros(0, dtype=torch.int64)
    try:
        importance_weights(numbers, numbers, mask, rows, 0, threshold=settings.correction_bound)
    except ConfigError as error:
        raise error.reworded(f"method.correction_bound: {error}") from error
    try:
        reject(numbers, numbers, mask, rows, 0, dict(settings.rejection))
    except ConfigError as error:
        raise error.reworded(f"method.rejection: {error}") from error


def correct(settings: Any, batch: Batch, step: Step) -> Batch:
    """Set `rollout_weights`, mask rejected tokens, and log `correction/...` metrics.

    With `bypass` the engine's log-probs become the old ones, so that the loss's ratio is that of
    the current policy and the engine.
    """
    if settings.correction == "bypass" and not settings.rejection:
        return _bypass(batch)
    level = "token" if settings.correction == "auto" else settings.correction
    sampled = batch.tokens["loss_mask"] & (batch.tokens["token_source"] == POLICY)
    train = batch.tokens["old_logprobs"]
    rollout = batch.tokens["behavior_logprobs"]
    shape = (sampled, batch.row_index, len(batch))
    metrics = mismatch_metrics(train, rollout, *shape)
    if level not in UNWEIGHTED:
        weights = importance_weights(
            train,
            rollout,
            *shape,
            level=level,
            threshold=settings.correction_bound,
        )
        metrics |= weights.metrics
        batch.tokens["rollout_weights"] = weights.values.where(sampled, 1.0)
    if settings.rejection:
        rejection = reject(train, rollout, *shape, dict(settings.rejection))
        batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & (rejection.keep | ~sampled)
        metrics |= rejection.metrics
    step.metrics |= {f"correction/{name}": float(value) for name, value in metrics.items()}
    return _bypass(batch) if settings.correction == "bypass" else batch


def _bypass(batch: Batch) -> Batch:
    """Set `old_logprobs` of the tokens that the engine sampled to the engine's log-probs."""
    rollout = batch.tokens["behavior_logprobs"]
    old = batch.tokens.get("old_logprobs", rollout)
    sampled = batch.tokens["token_source"] == POLICY
    batch.tokens["old_logprobs"] = torch.where(sampled, rollout, old)
    return batch


def weights_for(loss: Loss, batch: Batch) -> Tensor:
    """(tokens,) the importance weights `rollout_weights` in the form that the loss needs."""
    weights = batch.tokens["rollout_weights"]
    if not loss.row_weights:
        return weights
    mask = batch.tokens["loss_mask"]
    return geometric_row_weights(weights, mask, batch.row_index, len(batch))


def log_engine_gap(batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
    """Log the difference of the engine's and the trainer's log-probs on sampled tokens.

    kl/engine estimates KL(engine, trainer).
    """
    sampled = batch.tokens["token_source"] == POLICY
    gap = batch.tokens["behavior_logprobs"] - logprobs.detach()
    metrics.mean("kl/engine", gap, sampled)
    metrics.mean("engine/gap_mean", gap.abs(), sampled)
    metrics.peak("engine/gap_max", gap.abs(), sampled)
