"""Checks of the settings of GRPO, before a run writes anything. All raise ConfigError."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from postgrad.errors import ConfigError

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


class GrpoMethod(Protocol):
    """What these functions read of a method of the GRPO family."""

    config: Any
    settings: Any
    offers: ClassVar[tuple[str, ...]]
    own_reward_parts: ClassVar[tuple[str, ...]]
    advantage: Any
    objective: Any
    kl_coef: float

    def roles(self) -> dict[str, Any]: ...

    def estimate(self, batch: Any, step: Any) -> Any: ...


def check(method: GrpoMethod) -> None:
    """Refuses settings that the advantage, the loss or the KL penalty cannot use."""
    check_advantage(method)
    check_kl(method)
    check_loss_options(method)
    check_overlong_buffer(method)
    check_maxrl(method)


def aggregation_note(method: GrpoMethod) -> list[str]:
    """A line if the formula of the loss assumes another aggregation than the one that is set."""
    assumed = method.objective.policy_loss.aggregation
    chosen = method.settings.aggregation
    if assumed in (None, chosen):
        return []
    return [
        f"the formula of method.loss={method.settings.loss} assumes "
        f"method.aggregation={assumed}; this run has {chosen}"
    ]


def check_advantage(method: GrpoMethod) -> None:
    """Refuses an advantage whose needs or options the method does not have."""
    settings = method.settings
    advantage = method.advantage
    key = f"method.advantage={settings.advantage}"
    for need in advantage.needs:
        if need not in method.offers or (need == "critic" and "critic" not in method.roles()):
            fix = "use the recipe ppo" if need == "critic" else "use the recipe made for it"
            raise ConfigError(f"{key} needs a {need}; {settings.name} has none: {fix}")
    if "environment" in advantage.needs and not method.config.environment.name:
        raise ConfigError(f"{key} needs rewards per turn; add environment=file.py:Class")
    for option in advantage.options:
        if not hasattr(settings, option):
            raise ConfigError(
                f"{key} reads method.{option}; {settings.name} has no such setting: "
                "remove it from options=(...) and give the argument a default"
            )
    samples = method.config.rollout.samples
    is_called = type(method).estimate.__module__.startswith("postgrad.")
    if samples < 2 and "groups" in advantage.reads and is_called:
        raise ConfigError(
            f"rollout.samples={samples}: {settings.advantage} compares the responses of a group; "
            "use rollout.samples=8"
        )
    if "named_rewards" in advantage.needs and not settings.reward_weights:
        raise ConfigError(
            f"{key} needs reward parts by name; add e.g. method.reward_weights.answer=1.0"
        )
    if settings.reward_weights and "reward_weights" not in advantage.options:
        raise ConfigError(
            f"method.reward_weights has no effect with {key}; use method.advantage=gdpo, or weigh "
            'the parts in the verifier: reward.verifier="math + 0.1*format"'
        )
    if settings.gamma != 1.0 and "gamma" not in advantage.options:
        raise ConfigError(
            f"method.gamma={settings.gamma:g} has no effect with {key}, which does not discount; "
            "remove it"
        )
    if not settings.refill_by:
        raise ConfigError("method.refill_by is empty; name a part of the score, such as answer")


def reward_parts(method: GrpoMethod) -> dict[str, str]:
    """The parts of the verifier's score that the settings name, by setting."""
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


def check_kl(method: GrpoMethod) -> None:
    """Refuses KL settings that do not go together."""
    settings = method.settings
    estimator = settings.kl_estimator
    if settings.kl == "loss" and estimator == "k1" and not settings.kl_ratio:
        raise ConfigError(
            "method.kl_estimator=k1 in the loss has a gradient of mean 0, so it keeps the policy "
            "nowhere; use k1+, k2 or k3, or add method.kl_ratio=true"
        )
    if settings.kl != "reward":
        return
    if estimator.endswith("+"):
        raise ConfigError(
            f"method.kl_estimator={estimator} differs from "
            f"{estimator[:-1]} in its gradient only, and a reward has none; "
            "use k1, k2, k3 or abs"
        )
    reads_one_reward = not {"rewards", "token_rewards"}.isdisjoint(method.advantage.reads)
    if not reads_one_reward or "named_rewards" in method.advantage.needs:
        raise ConfigError(
            f"method.kl=reward needs a single reward, and method.advantage={settings.advantage} "
            "reads several; use method.kl=loss"
        )


def check_loss_options(method: GrpoMethod) -> None:
    """Refuses options that the loss does not have, and required options that are missing."""
    settings = method.settings
    loss = method.objective.policy_loss
    key = f"method.loss={settings.loss}"
    clips = [name for name in CLIPS if getattr(settings, name) is not None]
    options = (*loss.options, *loss.selection, *method.objective.options)
    for name in [*settings.loss_options, *clips]:
        if name not in options:
            known = ", ".join(options) or "none"
            raise ConfigError(f"{key} has no option {name}; its options: {known}")
    for name in loss.required:
        if name not in settings.loss_options:
            raise ConfigError(f"{key} needs method.loss_options.{name}=NUMBER")
    _check_selection({**loss.selection, **settings.loss_options}, key)


def _check_selection(options: Mapping[str, float], key: str) -> None:
    """Refuses a share outside 0 to 1 and an empty band of clip_cov and kl_cov."""
    share = options.get("cov_share", 1.0)
    if not 0 < share <= 1:
        raise ConfigError(
            f"method.loss_options.cov_share={share:g} of {key} must be above 0 and at most 1"
        )
    low = options.get("cov_low", 0.0)
    high = options.get("cov_high", low + 1)
    if not low < high:
        raise ConfigError(
            f"method.loss_options.cov_low={low:g} of {key} must be below cov_high={high:g}"
        )


def check_overlong_buffer(method: GrpoMethod) -> None:
    buffer = method.settings.overlong_buffer
    limit = method.config.rollout.max_response_tokens
    if buffer > limit:
        raise ConfigError(
            f"method.overlong_buffer={buffer} exceeds rollout.max_response_tokens={limit}; "
            f"use at most {limit}"
        )


def check_maxrl(method: GrpoMethod) -> None:
    """Refuses settings that make rewards negative with an advantage that divides by their mean."""
    settings = method.settings
    if settings.advantage != "maxrl":
        return
    negative = {
        f"method.overlong_buffer={settings.overlong_buffer}": settings.overlong_buffer > 0,
        "method.kl=reward": settings.kl == "reward",
        "reward.objective=minimize": method.config.reward.objective == "minimize",
    }
    for key, is_set in negative.items():
        if is_set:
            raise ConfigError(
                f"{key} makes rewards negative, and method.advantage=maxrl divides by their mean; "
                "remove it"
            )
