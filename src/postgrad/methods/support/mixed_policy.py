"""Settings and metrics of groups that contain tokens of others: demonstrations or replays."""

from dataclasses import dataclass, field

from torch import Tensor

from postgrad.algorithms.shaping import SHAPES
from postgrad.config.schema import setting
from postgrad.methods.step import Step
from postgrad.methods.support.grpo_settings import GrpoSettings
from postgrad.types import DEMONSTRATION, REPLAY, Batch


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
        "aided": ~on_policy,
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
