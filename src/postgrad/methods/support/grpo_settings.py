"""Settings of GRPO and of every method that extends it, and which of them exclude each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from postgrad.algorithms.advantages import ADVANTAGES, Advantage
from postgrad.algorithms.kl import KL_ESTIMATORS
from postgrad.algorithms.losses import LOSSES, Loss
from postgrad.config.schema_rollout import ENGINE_APART
from postgrad.config.setting import Condition, setting
from postgrad.errors import Conflict, Missing, NoEffect, UnknownName, UserCode, WrongValue
from postgrad.methods.method import MethodSettings
from postgrad.methods.support.correction import CORRECTIONS

# Conditions of settings: a correction that is set, or the one of an engine with its own weights.
AUTO = tuple(f"method.correction=auto and {condition}" for condition in ENGINE_APART)
WEIGHTED = ("method.correction=token,sequence,geometric", *AUTO)
CORRECTED = ("method.correction=rejection,token,sequence,geometric,bypass", *AUTO)
CLIPS = ("clip_low", "clip_high", "dual_clip")
# What GRPO has for the `needs` of an advantage.
OFFERS = (
    "group>=2",
    "named_rewards",
    "greedy",
    "sum_probs_squared",
    "source",
    "critic",
    "environment",
)


def _read_by_advantages(option: str) -> str:
    """Return the condition of a setting that some of the advantages read."""
    without = [name for name, one in ADVANTAGES.items() if option not in one.options]
    return f"method.advantage!={','.join(without)}"


@dataclass
class GrpoSettings(MethodSettings):
    # A method that extends this one may read the setting otherwise.
    only_with: ClassVar[dict[str, Condition]] = {
        "normalize_by_std": _read_by_advantages("normalize_by_std")
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
        only_with=_read_by_advantages("gamma"),
    )
    reward_weights: dict[str, float] = setting(
        {},
        "gdpo: weights of the named reward parts; others read a sum, as in "
        'reward.verifier="math + 0.1*format"',
        only_with=_read_by_advantages("reward_weights"),
    )
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
    rejection: dict[str, str] = setting(
        {}, "rules that mask tokens or rows, e.g. token_k1: 0.5_2.0", only_with=CORRECTED
    )


def kl_estimator(settings: GrpoSettings) -> str:
    """Return the estimator of the KL penalty: the one that is set, or the default of its place.

    A reward needs the value of the KL, which k1 gives without bias to the policy gradient. A loss
    needs a gradient, which k1 does not have on average.
    """
    if settings.kl_estimator != "auto":
        return settings.kl_estimator
    return "k1" if settings.kl == "reward" else "k3"


def loss_options(settings: GrpoSettings, loss: Loss) -> dict[str, float]:
    """Return the options that the loss's function is called with: those that are set."""
    options = dict(settings.loss_options)
    for name in loss.selection:
        options.pop(name, None)
    for name in CLIPS:
        value = getattr(settings, name)
        if value is not None:
            options.setdefault(name, value)
    return options


# ---- checks, before a run writes anything; all raise ConfigError


def check_grpo(method: Any) -> None:
    """Refuse settings that the advantage, the loss or the KL penalty cannot use."""
    check_advantage(method)
    check_kl(method)
    check_loss_options(method)
    check_overlong_buffer(method)


def aggregation_note(method: Any) -> list[str]:
    """Return a line if the loss's formula assumes another aggregation than the one that is set."""
    assumed = method.objective.policy_loss.aggregation
    chosen = method.settings.aggregation
    if assumed in (None, chosen):
        return []
    return [
        f"the formula of method.loss={method.settings.loss} assumes "
        f"method.aggregation={assumed}; this run has {chosen}"
    ]


def _check_read(settings: Any, key: str, advantage: Advantage) -> None:
    """Refuse settings of other advantages that a user's advantage does not read."""
    known = {option for one in ADVANTAGES.values() for option in one.options}
    defaults = type(settings)()
    for name in sorted(known - {*advantage.options}):
        value = getattr(settings, name, None)
        if value != getattr(defaults, name, None):
            raise NoEffect(
                f"method.{name}={value} has no effect: {key} does not read it; "
                f"add {name} to its options"
            )


def check_advantage(method: Any) -> None:
    """Refuse an advantage whose needs or options the method does not have."""
    settings = method.settings
    advantage = method.advantage
    key = f"method.advantage={settings.advantage}"
    for need in advantage.needs:
        if need not in method.offers or (need == "critic" and "critic" not in method.roles()):
            fix = "use the recipe ppo" if need == "critic" else "use the recipe made for it"
            raise Conflict(f"{key} needs a {need}; {settings.name} has none: {fix}")
    if "environment" in advantage.needs and not method.config.environment.name:
        raise Missing(f"{key} needs rewards per turn; add environment=file.py:Class")
    for option in advantage.options:
        if not hasattr(settings, option):
            raise UserCode(
                f"{key} reads method.{option}; {settings.name} has no such setting: "
                "remove it from options=(...) and give the argument a default"
            )
    if settings.advantage not in ADVANTAGES:  # `only_with` knows the named ones
        _check_read(settings, key, advantage)
    samples = method.config.rollout.samples
    is_called = type(method).estimate.__module__.startswith("postgrad.")
    if samples < 2 and "groups" in advantage.reads and is_called:
        raise Conflict(
            f"rollout.samples={samples}: {settings.advantage} compares the responses of a group; "
            "use rollout.samples=8"
        )
    if "named_rewards" in advantage.needs and not settings.reward_weights:
        raise Missing(
            f"{key} needs reward parts by name; add e.g. method.reward_weights.answer=1.0"
        )
    if not settings.refill_by:
        raise Missing("method.refill_by is empty; name a part of the score, such as answer")


def reward_parts(method: Any) -> dict[str, str]:
    """Return the parts of the verifier's score that the settings name, by setting."""
    settings = method.settings
    parts: dict[str, str] = {}
    if "named_rewards" in method.advantage.needs:
        parts = {f"method.reward_weights.{name}": name for name in settings.reward_weights}
    if settings.max_refills and settings.refill_by not in ("score", "reward"):
        parts[f"method.refill_by={settings.refill_by}"] = settings.refill_by
    own = list(method.own_reward_parts)
    if settings.overlong_buffer:
        own.append("overlong")
    return {key: name for key, name in parts.items() if name not in own}


def check_kl(method: Any) -> None:
    """Refuses KL settings that do not go together."""
    settings = method.settings
    estimator = settings.kl_estimator
    if settings.kl == "loss" and estimator == "k1" and not settings.kl_ratio:
        raise Conflict(
            "method.kl_estimator=k1 in the loss has a gradient of mean 0, so it keeps the policy "
            "nowhere; use k1+, k2 or k3, or add method.kl_ratio=true"
        )
    if settings.kl != "reward":
        return
    if estimator.endswith("+"):
        raise Conflict(
            f"method.kl_estimator={estimator} differs from "
            f"{estimator[:-1]} in its gradient only, and a reward has none; "
            "use k1, k2, k3 or abs"
        )
    reads_one_reward = not {"rewards", "token_rewards"}.isdisjoint(method.advantage.reads)
    if not reads_one_reward or "named_rewards" in method.advantage.needs:
        raise Conflict(
            f"method.kl=reward needs a single reward, and method.advantage={settings.advantage} "
            "reads several; use method.kl=loss"
        )


def check_loss_options(method: Any) -> None:
    """Refuses options that the loss does not have, and required options that are missing."""
    settings = method.settings
    loss = method.objective.policy_loss
    key = f"method.loss={settings.loss}"
    clips = [name for name in CLIPS if getattr(settings, name) is not None]
    options = (*loss.options, *loss.selection, *method.objective.options)
    for name in [*settings.loss_options, *clips]:
        if name not in options:
            known = ", ".join(options) or "none"
            raise UnknownName(f"{key} has no option {name}; its options: {known}")
    for name in loss.required:
        if name not in settings.loss_options:
            raise Missing(f"{key} needs method.loss_options.{name}=NUMBER")
    _check_selection({**loss.selection, **settings.loss_options}, key)


def _check_selection(options: Mapping[str, float], key: str) -> None:
    """Refuses a share outside 0 to 1 and an empty band of clip_cov and kl_cov."""
    share = options.get("cov_share", 1.0)
    if not 0 < share <= 1:
        raise WrongValue(
            f"method.loss_options.cov_share={share:g} of {key} must be above 0 and at most 1"
        )
    low = options.get("cov_low", 0.0)
    high = options.get("cov_high", low + 1)
    if not low < high:
        raise Conflict(
            f"method.loss_options.cov_low={low:g} of {key} must be below cov_high={high:g}"
        )


def check_overlong_buffer(method: Any) -> None:
    buffer = method.settings.overlong_buffer
    limit = method.config.rollout.max_response_tokens
    if buffer > limit:
        raise Conflict(
            f"method.overlong_buffer={buffer} exceeds rollout.max_response_tokens={limit}; "
            f"use at most {limit}"
        )
