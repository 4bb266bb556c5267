"""Settings of GRPO and of every method that extends it."""

from dataclasses import dataclass
from typing import ClassVar

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.kl import KL_ESTIMATORS
from postgrad.algorithms.losses import LOSSES, Loss
from postgrad.config.effects import Condition
from postgrad.config.schema_rollout import ENGINE_APART
from postgrad.config.setting import setting
from postgrad.methods.support.correction import CORRECTIONS
from postgrad.methods.support.grpo_checks import CLIPS
from postgrad.methods.support.synced_reference import ReferenceSettings

# Conditions of settings: a correction that is set, or the one of an engine with its own weights.
AUTO = tuple(f"method.correction=auto and {condition}" for condition in ENGINE_APART)
WEIGHTED = ("method.correction=token,sequence,geometric", *AUTO)
CORRECTED = ("method.correction=rejection,token,sequence,geometric,bypass", *AUTO)
WITHOUT_STD = [name for name, one in ADVANTAGES.items() if "normalize_by_std" not in one.options]


@dataclass
class GrpoSettings(ReferenceSettings):
    only_with: ClassVar[dict[str, Condition]] = {
        "reference_sync_every": "method.kl!=none",
        "reference_mixup": "method.kl!=none",
        "normalize_by_std": f"method.advantage!={','.join(WITHOUT_STD)}",
    }
    advantage: str = setting(
        "grpo",
        "advantage estimator: a name of docs/algorithms.md, file.py:NAME or package.module:NAME",
        choices=tuple(ADVANTAGES),
        or_path=True,
    )
    normalize_by_std: bool = setting(
        True, "divide a group's advantages by its standard deviation; false is Dr. GRPO"
    )
    gamma: float = setting(
        1.0,
        "discount of token-level estimators",
        above=0.0,
        at_most=1.0,
    )
    reward_weights: dict[str, float] = setting({}, "gdpo: weights of the named reward parts")
    loss: str = setting(
        "ppo_clip",
        "policy loss: a name of docs/algorithms.md, file.py:NAME or package.module:NAME",
        choices=tuple(LOSSES),
        or_path=True,
    )
    clip_low: float | None = setting(
        None,
        "clip the ratio below 1 - this; null: the loss's default; inf: no clip",
        at_least=0.0,
        may_be_infinite=True,
    )
    clip_high: float | None = setting(
        None,
        "clip the ratio above 1 + this; null: the loss's default; inf: no clip",
        at_least=0.0,
        may_be_infinite=True,
    )
    dual_clip: float | None = setting(
        None,
        "bound of the ratio where the advantage is negative; null: the loss's default; inf: none",
        above=1.0,
        may_be_infinite=True,
    )
    loss_options: dict[str, float] = setting({}, "more options of the loss, by name")
    kl: str = setting(
        "none",
        "KL penalty to the reference: none, in the loss, or in the reward",
        choices=("none", "loss", "reward"),
    )
    kl_estimator: str = setting(
        "auto",
        "estimator of the KL penalty; auto: k3 in the loss, k1 in the reward, as in verl",
        choices=("auto", *KL_ESTIMATORS),
        only_with="method.kl!=none",
    )
    kl_coef: float = setting(
        0.001,
        "coefficient of the KL penalty; its start if kl_target is set",
        at_least=0.0,
        only_with="method.kl!=none",
    )
    kl_ratio: bool = setting(
        False,
        "multiply the KL in the loss by the ratio of the current to the old policy, which makes "
        "it unbiased after the first update (DeepSeek-V3.2)",
        only_with="method.kl=loss",
    )
    kl_target: float | None = setting(
        None,
        "adapt the coefficient to this KL (method.kl=reward only); null: fixed",
        above=0.0,
        only_with="method.kl=reward",
    )
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus", at_least=0.0)
    top_entropy: float = setting(
        1.0,
        "share of an update's tokens that the policy loss uses, those where the policy had the "
        "highest entropy; 0.2 is the 80/20 rule, 1 is all",
        above=0.0,
        at_most=1.0,
    )
    overlong_buffer: int = setting(
        0,
        "DAPO: tokens before the limit over which the length penalty grows from 0 to 1; 0 is off",
        at_least=0,
    )
    max_refills: int = setting(
        0,
        "DAPO: times per step that groups without a difference are replaced by new ones; 0 is off",
        at_least=0,
    )
    refill_by: str = setting(
        "score",
        "DAPO: what must differ within a group: score (the verifier's), reward (with the length "
        "penalty), or a part of the verifier's score such as answer",
        only_with="method.max_refills",
    )
    mask_truncated: bool = setting(
        False,
        "leave responses that reach rollout.max_response_tokens out of the loss; their rewards "
        "still count in their groups",
    )
    correction: str = setting(
        "auto",
        "importance weights for an engine with its own weights; auto: token for such an engine; "
        "rejection: only the rules of method.rejection; bypass: no weights, the engine's "
        "log-probs are the old ones in the loss",
        choices=CORRECTIONS,
    )
    correction_bound: str = setting(
        "2.0",
        "C truncates the weights at C; lo_hi sets weights outside to zero",
        only_with=WEIGHTED,
    )
    correction_normalize: bool = setting(
        False,
        "divide the weights by their mean over the batch, so that their mean is 1",
        only_with=WEIGHTED,
    )
    rejection: dict[str, str] = setting(
        {}, "rules that mask tokens or rows, e.g. token_k1: 0.5_2.0", only_with=CORRECTED
    )


def kl_estimator(settings: GrpoSettings) -> str:
    """The estimator of the KL penalty: the one that is set, or the default of its place.

    A reward needs the value of the KL, which k1 gives without bias to the policy gradient. A loss
    needs a gradient, which k1 does not have on average.
    """
    if settings.kl_estimator != "auto":
        return settings.kl_estimator
    return "k1" if settings.kl == "reward" else "k3"


def loss_options(settings: GrpoSettings, loss: Loss) -> dict[str, float]:
    """The options that the loss's function is called with: those that are set."""
    options = dict(settings.loss_options)
    for name in loss.selection:
        options.pop(name, None)
    for name in CLIPS:
        value = getattr(settings, name)
        if value is not None:
            options.setdefault(name, value)
    return options
