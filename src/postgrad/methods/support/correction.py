"""Rollout correction: what to do when the engine that sampled is not exactly the policy that learns.

The log-probs of the engine (`behavior_logprobs`) are held against the trainer's (`old_logprobs`): weights multiply the loss, rules mask
tokens or rows whose ratio is out of bounds. Absent when the engine samples from the trainer's own parameters.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.correction import (
    importance_weights,
    mismatch_metrics,
    reject,
    weight_metrics,
)
from postgrad.errors import ConfigError
from postgrad.methods.base import Step
from postgrad.methods.support.checks import engine_apart, refuse_unread
from postgrad.model.policy import MetricAccumulator
from postgrad.rollout.engine import Engine
from postgrad.types import POLICY, Batch

CORRECTIONS = ("auto", "none", "token", "sequence", "geometric", "rejection")


def correction_on(settings: Any, engine: Engine) -> bool:
    """Whether this run corrects: when asked to, or by default when the engine keeps weights of its own."""
    return settings.correction not in ("auto", "none") or (
        settings.correction == "auto" and not engine.shares_weights
    )


def check_correction(config: Any) -> None:
    """Refuse bounds and rules that cannot be read, and those that nothing would apply. Raises ConfigError."""
    settings = config.method
    if settings.correction == "none" and settings.rejection:
        raise ConfigError(
            "method.correction=none switches method.rejection off too; use method.correction=rejection for rules without weights"
        )
    if settings.correction == "none":
        refuse_unread("method", settings, ["correction_bound"], "with method.correction=none")
    if settings.correction == "rejection" and not settings.rejection:
        raise ConfigError(
            "method.correction=rejection has no rules; add one, e.g. method.rejection.seq_mean_k1=0.999_1.001"
        )
    if settings.correction == "rejection" and settings.correction_bound != "2.0":
        raise ConfigError(
            f"method.correction_bound={settings.correction_bound} bounds weights, and method.correction=rejection has none; remove it"
        )
    nothing = (
        torch.zeros(0),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.bool),
        torch.zeros(0, dtype=torch.int64),
        0,
    )
    try:
        importance_weights(*nothing, threshold=settings.correction_bound)
    except ConfigError as error:
        raise ConfigError(f"method.correction_bound: {error}") from error
    try:
        reject(*nothing, dict(settings.rejection))
    except ConfigError as error:
        raise ConfigError(f"method.rejection: {error}") from error
    if settings.correction == "auto" and not engine_apart(config):
        for key, given in (
            ("rejection", settings.rejection),
            ("correction_bound", settings.correction_bound != "2.0"),
        ):
            if given:
                raise ConfigError(
                    f"method.{key} has no effect: the engine samples from the trainer's own weights, and method.correction=auto "
                    "corrects nothing then; remove it, or add method.correction=token"
                )


def correct(settings: Any, batch: Batch, step: Step) -> Batch:
    """Set `rollout_weights`, narrow `loss_mask` by the rejection rules, log how far engine and trainer are apart."""
    level = "token" if settings.correction == "auto" else settings.correction
    sampled = batch.tokens["loss_mask"] & (batch.tokens["token_source"] == POLICY)
    place = (sampled, batch.row_index, len(batch))
    train, rollout = batch.tokens["old_logprobs"], batch.tokens["behavior_logprobs"]
    metrics = mismatch_metrics(train, rollout, *place)
    if level != "rejection":
        weights = importance_weights(
            train, rollout, *place, level=level, threshold=settings.correction_bound
        ).values
        metrics = {**metrics, **weight_metrics(weights, *place)}
        batch.tokens["rollout_weights"] = weights.where(sampled, 1.0)
    if settings.rejection:
        rejection = reject(train, rollout, *place, dict(settings.rejection))
        batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & (rejection.keep | ~sampled)
        metrics = {**metrics, **rejection.metrics}
    step.metrics |= {f"correction/{name}": float(value) for name, value in metrics.items()}
    return batch


def log_engine_gap(batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
    """How far the engine's log-probs are from the trainer's on sampled tokens: kl/engine estimates KL(engine, trainer)."""
    sampled = batch.tokens["token_source"] == POLICY
    gap = batch.tokens["behavior_logprobs"] - logprobs.detach()
    metrics.mean("kl/engine", gap, sampled)
    metrics.mean("engine/gap_mean", gap.abs(), sampled)
    metrics.peak("engine/gap_max", gap.abs(), sampled)
