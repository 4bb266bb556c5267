"""Checks of LUFFY's settings, before a run writes anything. All raise ConfigError."""

from typing import Any

from postgrad.algorithms.prefixes import READS
from postgrad.errors import ConfigError
from postgrad.methods.base import Method
from postgrad.methods.support.checks import refuse_unread

PREFIX_SETTINGS = ("prefix_min", "prefix_max", "prefix_peak", "prefix_steps", "prefix_shared")
# Settings without effect if no demonstration is used.
DEMONSTRATION_SETTINGS = (
    "demonstration_share",
    "overlong_demonstrations",
    "wrong_demonstrations",
    "demonstration_probs",
    "prefix_strategy",
    *PREFIX_SETTINGS,
    "off_shape",
    "off_advantage_scale",
    "prefix_advantage",
)


def check(method: Method) -> None:
    """Refuses numbers that do not fit together."""
    settings = method.settings
    samples = method.config.rollout.samples
    if settings.num_demonstrations > samples:
        raise ConfigError(
            f"method.num_demonstrations={settings.num_demonstrations} exceeds "
            f"rollout.samples={samples}; set it to at most {samples}"
        )
    if settings.prefix_min > settings.prefix_max:
        raise ConfigError(
            f"method.prefix_min={settings.prefix_min} exceeds "
            f"method.prefix_max={settings.prefix_max}; lower it"
        )
    uses_parts = settings.prefix_strategy != "random" or settings.prefix_min < 1
    if uses_parts and settings.num_demonstrations and method.config.rollout.tools:
        raise ConfigError(
            "rollout.tools needs whole demonstrations, because a part of one may end inside a tool "
            "call; use method.prefix_strategy=random method.prefix_min=1, or remove rollout.tools"
        )
    if settings.demonstration_probs and (uses_parts or settings.sft_coef):
        raise ConfigError(
            "method.demonstration_probs needs whole demonstrations (method.prefix_min=1) and "
            "method.sft_coef=0"
        )


def check_unread(settings: Any) -> None:
    """Refuses settings that the chosen use of demonstrations does not read."""
    if not settings.num_demonstrations:
        reason = "with method.num_demonstrations=0"
        refuse_unread("method", settings, DEMONSTRATION_SETTINGS, reason)
    strategy = settings.prefix_strategy
    read = READS[strategy]
    unread = [name for name in PREFIX_SETTINGS if name.removeprefix("prefix_") not in read]
    refuse_unread("method", settings, unread, f"with method.prefix_strategy={strategy}")
    if settings.demonstration_probs:
        reason = "with method.demonstration_probs, whose ratio is exact"
        refuse_unread("method", settings, ["off_shape"], reason)
