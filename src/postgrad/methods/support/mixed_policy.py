"""GRPO on groups that contain tokens of others, demonstrations or replays: LUFFY and ExGRPO."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.shaping import (
    OFF_OPTIONS,
    OFF_READS,
    ON_OPTIONS,
    ON_READS,
    SHAPES,
    check_options,
    drop_confident,
    off_policy_shape,
    reshaped_loss,
)
from postgrad.config.schema import setting
from postgrad.methods.grpo import Grpo
from postgrad.methods.step import Step
from postgrad.methods.support.grpo_settings import GrpoSettings
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import DEMONSTRATION, POLICY, REPLAY, Batch


@dataclass
class MixedPolicySettings(GrpoSettings):
    """What the loss does with tokens of others."""

    advantage: str = setting(
        "grpo",
        "grpo: baseline over all rows of a group; grpo_split: over rows of the policy alone",
        choices=("grpo", "grpo_split"),
    )
    loss: str = setting(
        "ppo_clip",
        "loss of the policy's own tokens; clip_low=inf and clip_high=inf: without clip",
        choices=("ppo_clip",),
    )
    kl: str = setting("none", "KL penalty to the reference", choices=("none", "loss"))
    off_shape: str = setting(
        "p_div_p",
        "shape of the ratio on tokens of others; algorithms/shaping.py lists them",
        choices=SHAPES,
        only_with="method.sft_coef=0",
    )
    off_options: dict[str, float] = field(
        default_factory=dict, metadata={"help": "gamma, weight, exponent, min_value, max_value"}
    )
    on_shape: str = setting("none", "shape of the ratio on the policy's own tokens", choices=SHAPES)
    on_options: dict[str, float] = field(
        default_factory=dict, metadata={"help": "gamma, weight, exponent"}
    )
    max_probability: float | None = setting(
        None, "mask tokens whose old probability is above this", above=0.0, at_most=1.0
    )
    sft_coef: float = setting(
        0.0,
        "above 0: coefficient of an SFT loss on tokens of others, a mean over all of them",
        at_least=0.0,
    )
    off_advantage_scale: float = setting(
        1.0,
        "factor of the advantages of tokens of others",
        at_least=0.0,
        only_with="method.sft_coef=0 and method.prefix_advantage=null",
    )
    on_advantage_scale: float = setting(
        1.0, "factor of the advantages of the policy's own tokens", at_least=0.0
    )
    prefix_advantage: float | None = setting(
        None,
        "advantage of tokens of others: this / rollout.samples; null: estimated",
        only_with="method.sft_coef=0",
    )
    truncated_advantage: bool = setting(
        True, "false: rows cut off at max_response_tokens get advantage 0"
    )


class MixedPolicyObjective(PolicyObjective):
    """GRPO's loss on the policy's tokens, the shaped off-policy loss on tokens of others."""

    def check(self) -> None:
        """Raise ConfigError for options that the shapes do not take."""
        settings, off_shape = self.settings, self.off_shape()
        off_reads = () if settings.sft_coef else OFF_READS[off_shape]
        reason = "method.sft_coef" if settings.sft_coef else f"method.off_shape={off_shape}"
        check_options("method.off_options", settings.off_options, OFF_OPTIONS, off_reads, reason)
        on_reads = ON_READS[settings.on_shape]
        reason = f"method.on_shape={settings.on_shape}"
        check_options("method.on_options", settings.on_options, ON_OPTIONS, on_reads, reason)

    def prepare(self, batch: Batch) -> Batch:
        """Mask tokens that the policy is sure of; give the entropy bonus a mean over tokens."""
        if self.settings.max_probability is not None:
            batch.tokens["loss_mask"] = drop_confident(
                batch.tokens["old_logprobs"],
                batch.tokens["loss_mask"],
                self.settings.max_probability,
            )
        mask = batch.tokens["loss_mask"]
        batch.tokens["entropy_weight"] = self.token_weights("token-mean", mask, batch)
        return super().prepare(batch)

    def loss_weight(self, batch: Batch) -> Tensor:
        """Return (tokens,) the weights. The SFT loss is a mean over all tokens of others."""
        if not self.settings.sft_coef:
            return super().loss_weight(batch)
        mask, off = batch.tokens["loss_mask"], off_policy(batch)
        policy_weight = self.token_weights(self.settings.aggregation, mask & ~off, batch)
        return policy_weight + self.token_weights("token-mean", mask & off, batch)

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """Return (tokens,) -A · f(p) on tokens of others, the policy loss on the others."""
        mask = batch.tokens["loss_mask"]
        off = off_policy(batch)
        ratio = self.off_ratio(current.logprobs - batch.tokens["behavior_logprobs"])
        on_values = self.on_policy_losses(batch, current, metrics)
        values = torch.where(off, -batch.tokens["advantages"] * ratio, on_values)
        weighted = (values * batch.tokens["loss_weight"]).detach()
        for name, part in (("on_policy", mask & ~off), ("off_policy", mask & off)):
            metrics.total(f"{name}/loss", float(weighted[part].sum()))
            metrics.total(f"{name}/tokens", float(part.sum()))
        metrics.mean("off_policy/ratio", ratio, mask & off)
        return values

    def off_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return (tokens,) f(p). For the SFT loss it is log p: the loss is then -A · log p."""
        if self.settings.sft_coef:
            return log_ratio
        return off_policy_shape(log_ratio, self.off_shape(), **self.settings.off_options)

    def off_shape(self) -> str:
        """Return the shape f of the ratio on tokens of others."""
        return self.settings.off_shape

    def on_policy_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """Return (tokens,) the loss of the policy's tokens; meaningless on tokens of others."""
        policy_mask = batch.tokens["loss_mask"] & ~off_policy(batch)
        tokens = {**batch.tokens, "loss_mask": policy_mask}  # metrics count these tokens only
        policy_batch = Batch(batch.prompt, batch.response, tokens, dict(batch.rows))
        values = super().token_losses(policy_batch, current, metrics)
        shape = self.on_shape(batch)
        if shape == "none":
            return values
        options = self.loss_options(batch)
        options.pop("dual_clip", None)
        return reshaped_loss(
            current.logprobs,
            batch.tokens["old_logprobs"],
            batch.tokens["advantages"],
            shape,
            **options,
            **self.settings.on_options,
        )

    def on_shape(self, batch: Batch) -> str:
        """Return the shape of the ratio on the policy's tokens."""
        return self.settings.on_shape


class MixedPolicy(Grpo):
    """GRPO on groups with tokens of others; ExGRPO derives from it as well."""

    Settings = MixedPolicySettings
    Objective = MixedPolicyObjective
    traits = replace(Grpo.traits, environments=False)  # rows of others have no reward of one

    def score(self, batch: Batch, step: Step) -> Batch:
        """Score all rows with one verifier and log the mean reward per kind of row."""
        batch = super().score(batch, step)
        log_sources(batch, step)
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        """Log the share of tokens of others in the kept rows."""
        batch = super().refill(batch, step)
        log_token_share(batch, step)
        return batch

    def log_rewards(self, batch: Batch, step: Step) -> None:
        """Log the mean reward per kind of row over all refills."""
        super().log_rewards(batch, step)
        log_sources(batch, step)

    def needs_old_logprobs(self) -> bool:
        """Return whether something reads them, here also method.max_probability."""
        return super().needs_old_logprobs() or self.settings.max_probability is not None

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Skip rows without a token of the policy, unless a setting reads their values."""
        from_policy = batch.sum_tokens((batch.tokens["token_source"] == POLICY).long()) > 0
        is_setting_read = self.settings.max_probability is not None
        rows = torch.nonzero(from_policy | is_setting_read)[:, 0]
        part = super().compute_old_logprobs(batch.select(rows), step)
        for name in ("old_logprobs", "sum_probs_squared", "entropy"):
            batch.tokens[name] = torch.zeros(batch.num_tokens)
            batch.tokens[name][batch.response.positions(rows)] = part.tokens[name]
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """Exclude rows with a given prefix from the baseline of grpo_split, by `on_policy`."""
        return super().advantage_columns(batch, step) | {"on_policy": on_policy_rows(batch)}

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Scale the group's advantages by who wrote the token."""
        batch = super().estimate(batch, step)
        settings = self.settings
        off = off_policy(batch)
        scale = torch.where(off, settings.off_advantage_scale, settings.on_advantage_scale)
        values = batch.tokens["advantages"] * scale
        if not settings.truncated_advantage:
            truncated = torch.tensor([finish == "length" for finish in batch.rows["finish"]])
            values = values * ~batch.expand(truncated)
        if settings.prefix_advantage is not None:
            constant = settings.prefix_advantage / self.config.rollout.samples
            values = torch.where(off, constant, values)
        if settings.sft_coef:  # the loss -A · log p with a constant A is the SFT loss
            values = torch.where(off, settings.sft_coef, values)
        batch.tokens["advantages"] = values * batch.tokens["loss_mask"]
        return batch


def off_policy(batch: Batch) -> Tensor:
    """Return (tokens,) bool: tokens of a demonstration or a replay."""
    source = batch.tokens["token_source"]
    return (source == DEMONSTRATION) | (source == REPLAY)


def on_policy_rows(batch: Batch) -> Tensor:
    """Return (rows,) bool: rows without a token of others."""
    return batch.sum_tokens(off_policy(batch).long()) == 0


def log_sources(batch: Batch, step: Step) -> None:
    """Set the mean reward per kind of row and the share of tokens of others."""
    source = batch.rows["source"]
    on_policy = on_policy_rows(batch)
    kinds = {
        "on_policy": on_policy,
        "with_demonstration_tokens": ~on_policy,
        "demonstration": source == DEMONSTRATION,
        "replay": source == REPLAY,
    }
    for name, rows in kinds.items():
        if bool(rows.any()):
            step.metrics[f"reward/{name}"] = float(batch.rows["reward"][rows].double().mean())
    log_token_share(batch, step)


def log_token_share(batch: Batch, step: Step) -> None:
    """Set the share of tokens of others."""
    step.metrics["off_policy/token_share"] = float(off_policy(batch).double().mean())
