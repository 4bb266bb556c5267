"""Groups that contain tokens of others: the base of LUFFY (demonstrations) and ExGRPO (replays).

Tokens of others get the shaped off-policy loss -A · g(p / p_author); the policy's own tokens get
the ratio loss, clipped or not. With `method.sft_coef` the tokens of others get an SFT loss instead
(RL with SFT loss). The loss is chosen per token: a row with a given prefix and a sampled rest has
both.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.aggregation import token_weights
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
from postgrad.methods.base import Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.support.checks import refuse_unread
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import DEMONSTRATION, POLICY, REPLAY, Batch


@dataclass
class MixedPolicySettings(GrpoSettings):
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
        1.0, "factor of the advantages of tokens of others", at_least=0.0
    )
    on_advantage_scale: float = setting(
        1.0, "factor of the advantages of the policy's own tokens", at_least=0.0
    )
    prefix_advantage: float | None = setting(
        None, "advantage of tokens of others: this / rollout.samples; null: estimated"
    )
    truncated_advantage: bool = setting(
        True, "false: rows cut off at max_response_tokens get advantage 0"
    )


def off_policy(batch: Batch) -> Tensor:
    """(tokens,) bool: tokens of a demonstration or a replay."""
    source = batch.tokens["token_source"]
    return (source == DEMONSTRATION) | (source == REPLAY)


def on_policy_rows(batch: Batch) -> Tensor:
    """(rows,) bool: rows without a token of others."""
    return batch.sum_tokens(off_policy(batch).long()) == 0


class MixedPolicy(Grpo):
    Settings = MixedPolicySettings
    supports_environments = False  # rows of others have no reward of an environment

    def check(self) -> None:
        super().check()
        settings = self.settings
        if settings.sft_coef:
            off_reads: tuple[str, ...] = ()
            reason = "method.sft_coef"
        else:
            off_reads = OFF_READS[self.off_shape()]
            reason = f"method.off_shape={self.off_shape()}"
        check_options("method.off_options", settings.off_options, OFF_OPTIONS, off_reads, reason)
        on_reads = ON_READS[settings.on_shape]
        reason = f"method.on_shape={settings.on_shape}"
        check_options("method.on_options", settings.on_options, ON_OPTIONS, on_reads, reason)

    def check_unread(self) -> None:
        super().check_unread()
        settings = self.settings
        if settings.sft_coef:
            names = ["off_shape", "off_advantage_scale", "prefix_advantage"]
            reason = "with method.sft_coef, the loss of tokens of others"
            refuse_unread("method", settings, names, reason)
        if settings.prefix_advantage is not None:
            reason = "with method.prefix_advantage"
            refuse_unread("method", settings, ["off_advantage_scale"], reason)

    def needs_old_logprobs(self) -> bool:
        return super().needs_old_logprobs() or self.settings.max_probability is not None

    # ---- stages, on the driver

    def score(self, batch: Batch, step: Step) -> Batch:
        """Scores all rows with one verifier and logs the mean reward per kind of row."""
        batch = super().score(batch, step)
        self.log_sources(batch, step)
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        """Logs the share of tokens of others in the kept rows."""
        batch = super().refill(batch, step)
        self.log_token_share(batch, step)
        return batch

    def log_rewards(self, batch: Batch, step: Step) -> None:
        super().log_rewards(batch, step)
        self.log_sources(batch, step)

    def log_sources(self, batch: Batch, step: Step) -> None:
        """Sets the mean reward per kind of row and the share of tokens of others."""
        source = batch.rows["source"]
        on_policy = on_policy_rows(batch)
        kinds = {
            "on_policy": on_policy,
            "aided": ~on_policy,
            "demonstration": source == DEMONSTRATION,
            "replay": source == REPLAY,
        }
        for name, rows in kinds.items():
            if bool(rows.any()):
                step.metrics[f"reward/{name}"] = float(batch.rows["reward"][rows].double().mean())
        self.log_token_share(batch, step)

    def log_token_share(self, batch: Batch, step: Step) -> None:
        step.metrics["off_policy/token_share"] = float(off_policy(batch).double().mean())

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Skips rows without a token of the policy, unless a setting reads their values."""
        has_own = batch.sum_tokens((batch.tokens["token_source"] == POLICY).long()) > 0
        is_setting_read = self.settings.max_probability is not None or self.settings.top_entropy < 1
        rows = torch.nonzero(has_own | is_setting_read)[:, 0]
        part = super().compute_old_logprobs(batch.select(rows), step)
        for name in ("old_logprobs", "sum_probs_squared", "entropy"):
            batch.tokens[name] = torch.zeros(batch.num_tokens)
            batch.tokens[name][batch.response.positions(rows)] = part.tokens[name]
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """`on_policy` excludes rows with a given prefix from the baseline of grpo_split."""
        return super().advantage_columns(batch, step) | {"on_policy": on_policy_rows(batch)}

    def estimate(self, batch: Batch, step: Step) -> Batch:
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

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Sets the global denominators: of the policy loss, the SFT loss and the entropy bonus."""
        settings = self.settings
        mask = batch.tokens["loss_mask"]
        if settings.max_probability is not None:
            mask = drop_confident(batch.tokens["old_logprobs"], mask, settings.max_probability)
            batch.tokens["loss_mask"] = mask
        off = off_policy(batch)
        shape = (batch.row_index, len(batch), self.config.rollout.max_response_tokens)
        groups = batch.rows["group"]
        if settings.sft_coef:
            policy_mask = mask & ~off
            policy_weight = token_weights(settings.aggregation, policy_mask, *shape, groups=groups)
            sft_weight = token_weights("token-mean", mask & off, *shape)
            weight = policy_weight + sft_weight
        else:
            weight = token_weights(settings.aggregation, mask, *shape, groups=groups)
        batch.tokens["mixed_weight"] = weight
        batch.tokens["entropy_weight"] = token_weights("token-mean", mask, *shape)
        batch = super().prepare(batch)  # sets loss_weight, and may drop rows of all columns
        batch.tokens["loss_weight"] = batch.tokens["mixed_weight"]
        return batch

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        mask = batch.tokens["loss_mask"]
        advantages = batch.tokens["advantages"]
        off = off_policy(batch)
        values = self.on_policy_losses(batch, current, metrics)
        ratio = self.off_ratio(current.logprobs - batch.tokens["behavior_logprobs"])
        values = torch.where(off, -advantages * ratio, values)
        weighted = (values * batch.tokens["loss_weight"]).detach()
        for name, part in (("on_policy", mask & ~off), ("off_policy", mask & off)):
            metrics.total(f"{name}/loss", float(weighted[part].sum()))
            metrics.total(f"{name}/tokens", float(part.sum()))
        metrics.mean("off_policy/ratio", ratio, mask & off)
        return values

    def on_policy_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """(tokens,) the loss of the policy's own tokens; meaningless on tokens of others."""
        own_mask = batch.tokens["loss_mask"] & ~off_policy(batch)
        tokens = {**batch.tokens, "loss_mask": own_mask}  # metrics count own tokens only
        own = Batch(batch.prompt, batch.response, tokens, dict(batch.rows))
        values = super().token_losses(own, current, metrics)
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
        """The shape of the ratio on the policy's own tokens."""
        return self.settings.on_shape

    def off_shape(self) -> str:
        """The shape of the ratio on tokens of others."""
        return self.settings.off_shape

    def off_ratio(self, log_ratio: Tensor) -> Tensor:
        """(tokens,) the shaped ratio of tokens of others; for the SFT loss the log-ratio itself."""
        if self.settings.sft_coef:
            return log_ratio
        return off_policy_shape(log_ratio, self.off_shape(), **self.settings.off_options)
