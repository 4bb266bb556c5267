"""Groups that hold tokens of others: what LUFFY (demonstrations) and ExGRPO (replays) share. Where such rows come from is theirs to say.

Tokens of others get the shaped off-policy loss -A · g(p / p_author); the policy's own the clipped or open ratio loss. `method.sft_coef`
puts an SFT loss on the tokens of others instead (RL with SFT loss). Which token is whose is decided token by token, so a row that
somebody began and the policy went on with is priced in two parts.
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
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator
from postgrad.types import DEMONSTRATION, POLICY, REPLAY, Batch


@dataclass
class MixedSettings(GrpoSettings):
    advantage: str = setting(
        "grpo",
        "over all rows, or with the baseline of unaided rows",
        choices=("grpo", "grpo_split"),
    )
    loss: str = setting(
        "ppo_clip",
        "loss of the policy's own tokens; clip_low and clip_high inf: open",
        choices=("ppo_clip",),
    )
    kl: str = setting("none", "penalty for leaving the reference", choices=("none", "loss"))
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
        None, "leave out tokens the policy gave more before the step", above=0.0, at_most=1.0
    )
    sft_coef: float = setting(
        0.0,
        "above 0: SFT loss of this weight on tokens of others, a mean over all of them",
        at_least=0.0,
    )
    off_advantage_scale: float = setting(
        1.0, "factor on the advantages of tokens of others", at_least=0.0
    )
    on_advantage_scale: float = setting(
        1.0, "factor on the advantages of the policy's own tokens", at_least=0.0
    )
    prefix_advantage: float | None = setting(
        None, "this / rollout.samples instead of the advantages of tokens of others"
    )
    truncated_advantage: bool = setting(True, "false: rows cut off at the limit have no advantage")


def off_policy(batch: Batch) -> Tensor:
    """(tokens,) bool: tokens of a demonstration or a replay."""
    source = batch.tokens["token_source"]
    return (source == DEMONSTRATION) | (source == REPLAY)


def unaided(batch: Batch) -> Tensor:
    """(rows,) bool: rows without a token of others."""
    return batch.sum_tokens(off_policy(batch).long()) == 0


class Mixed(Grpo):
    Settings = MixedSettings
    takes_tools = False

    def check(self) -> None:
        super().check()
        shape, on_shape, sft = self.off_shape(), self.settings.on_shape, self.settings.sft_coef
        read, beside = (
            ((), "method.sft_coef") if sft else (OFF_READS[shape], f"method.off_shape={shape}")
        )
        check_options("method.off_options", self.settings.off_options, OFF_OPTIONS, read, beside)
        check_options(
            "method.on_options",
            self.settings.on_options,
            ON_OPTIONS,
            ON_READS[on_shape],
            f"method.on_shape={on_shape}",
        )

    def check_used(self) -> None:
        """The SFT loss takes the place of all that shapes tokens of others, a constant advantage that of its factor."""
        super().check_used()
        if self.settings.sft_coef:
            names = ["off_shape", "off_advantage_scale", "prefix_advantage"]
            refuse_unread(
                "method", self.settings, names, "with method.sft_coef, the loss of tokens of others"
            )
        if self.settings.prefix_advantage is not None:
            refuse_unread(
                "method", self.settings, ["off_advantage_scale"], "with method.prefix_advantage"
            )

    def needs_old(self) -> bool:
        return super().needs_old() or self.settings.max_probability is not None

    # ---- stages

    def score(self, batch: Batch, step: Step) -> Batch:
        """One verifier for all rows; what the policy reached alone is told apart from what it reached with help."""
        batch = super().score(batch, step)
        source, alone = batch.rows["source"], unaided(batch)
        parts = {
            "on_policy": alone,
            "aided": ~alone,
            "demonstration": source == DEMONSTRATION,
            "replay": source == REPLAY,
        }
        for name, rows in parts.items():
            if bool(rows.any()):
                step.metrics[f"reward/{name}"] = float(batch.rows["reward"][rows].double().mean())
        step.metrics["off_policy/token_share"] = float(off_policy(batch).double().mean())
        return batch

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Rows without a token of the policy's own are not computed: nobody reads their old log-probs."""
        own = batch.sum_tokens((batch.tokens["token_source"] == POLICY).long()) > 0
        rows = torch.nonzero(own | (self.settings.max_probability is not None))[:, 0]
        part = super().compute_old_logprobs(batch.select(rows), step)
        for name in ("old_logprobs", "sum_probs_squared"):
            batch.tokens[name] = torch.zeros(batch.num_tokens)
            batch.tokens[name][batch.response.positions(rows)] = part.tokens[name]
        return batch

    def columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """The split baseline leaves out every row that somebody else began: it is not what the policy reaches alone."""
        return super().columns(batch, step) | {"on_policy": unaided(batch)}

    def estimate(self, batch: Batch, step: Step) -> Batch:
        batch, settings, off = super().estimate(batch, step), self.settings, off_policy(batch)
        values = batch.tokens["advantages"] * torch.where(
            off, settings.off_advantage_scale, settings.on_advantage_scale
        )
        if not settings.truncated_advantage:
            values = values * ~batch.expand(
                torch.tensor([finish == "length" for finish in batch.rows["finish"]])
            )
        if settings.prefix_advantage is not None:
            values = torch.where(
                off, settings.prefix_advantage / self.config.rollout.samples, values
            )
        if settings.sft_coef:  # -A · log p with a constant A is the SFT loss
            values = torch.where(off, settings.sft_coef, values)
        batch.tokens["advantages"] = values * batch.tokens["loss_mask"]
        return batch

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Denominators over the whole optimizer step: of the policy loss, of the SFT loss (its tokens), of the entropy (all tokens)."""
        settings, off, mask = self.settings, off_policy(batch), batch.tokens["loss_mask"]
        if settings.max_probability is not None:
            mask = batch.tokens["loss_mask"] = drop_confident(
                batch.tokens["old_logprobs"], mask, settings.max_probability
            )
        place = (batch.row_index, len(batch), self.config.rollout.max_response_tokens)
        parts = (
            ((settings.aggregation, mask & ~off), ("token-mean", mask & off))
            if settings.sft_coef
            else ((settings.aggregation, mask),)
        )
        batch.tokens["part_weight"] = torch.stack(
            [token_weights(mode, part, *place) for mode, part in parts]
        ).sum(0)
        batch.tokens["entropy_weight"] = token_weights("token-mean", mask, *place)
        batch = super().prepare(batch)
        batch.tokens["loss_weight"] = batch.tokens["part_weight"]
        return batch

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        mask, advantages, off, settings = (
            batch.tokens["loss_mask"],
            batch.tokens["advantages"],
            off_policy(batch),
            self.settings,
        )
        own = Batch(
            batch.prompt,
            batch.response,
            {**batch.tokens, "loss_mask": mask & ~off},
            dict(batch.rows),
        )
        values = super().token_losses(
            own, current, metrics
        )  # whose metrics are of the policy's own tokens
        if (shape := self.on_shape(batch)) != "none":
            old = batch.tokens.get("old_logprobs", current.logprobs.detach())
            clip = {
                name: value
                for name, value in self.loss_settings(batch).items()
                if name != "dual_clip"
            }
            values = reshaped_loss(
                current.logprobs, old, advantages, shape, **clip, **settings.on_options
            )
        ratio = self.off_ratio(current.logprobs - batch.tokens["behavior_logprobs"])
        values = torch.where(off, -advantages * ratio, values)
        for name, part in (("on_policy", mask & ~off), ("off_policy", mask & off)):
            metrics.total(
                f"{name}/loss", float((values * batch.tokens["loss_weight"]).detach()[part].sum())
            )
            metrics.total(f"{name}/tokens", float(part.sum()))
        metrics.mean("off_policy/ratio", ratio, mask & off)
        return values

    def on_shape(self, batch: Batch) -> str:
        return self.settings.on_shape

    def off_shape(self) -> str:
        """The shape of the ratio on tokens of others."""
        return self.settings.off_shape

    def off_ratio(self, log_ratio: Tensor) -> Tensor:
        """(tokens,) what stands for the ratio on tokens of others, from the log of it; the log itself in an SFT loss."""
        settings = self.settings
        return (
            log_ratio
            if settings.sft_coef
            else off_policy_shape(log_ratio, self.off_shape(), **settings.off_options)
        )
