"""Settings of ExGRPO, and their checks, which raise ConfigError before a run writes anything."""

from dataclasses import dataclass
from typing import Any

from postgrad.algorithms.replay import BUCKET_WEIGHTS
from postgrad.config.schema import setting
from postgrad.errors import ConfigError
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.mixed_policy import MixedPolicySettings
from postgrad.methods.support.replay_pool import PICK_BY, POOL_RANGES


@dataclass
class ExGrpoSettings(MixedPolicySettings):
    start_at: float = setting(
        0.35,
        "the run is mixed after a step with more than this share of successes",
        at_least=0.0,
        at_most=1.0,
    )
    success_reward: float = setting(1.0, "smallest reward of a success")
    replay_share: float = setting(
        0.5, "largest share of a step's problems from the pool", at_least=0.0, at_most=1.0
    )
    buckets: str = setting(
        "normal",
        "weight of a problem by its latest number of successes; none: equal",
        choices=BUCKET_WEIGHTS,
    )
    pool_range: str = setting(
        "all", "problems of the pool to draw from, by age", choices=POOL_RANGES
    )
    pick_by: str = setting("entropy", "which stored row of a problem is replayed", choices=PICK_BY)
    pick: str = setting("min", "the row with the least or the most of it", choices=("min", "max"))
    importance: bool = setting(
        True, "ratio to the recorded log-probs; false: to 1, as for demonstrations"
    )
    retire_margin: int = setting(
        20, "problems that always remain besides those of one step", at_least=0
    )


def check(settings: Any) -> None:
    """Refuses refills."""
    if settings.max_refills:
        raise ConfigError(
            f"method.max_refills={settings.max_refills}: exgrpo chooses its problems itself; "
            "remove it"
        )


def check_unread(settings: Any) -> None:
    """Refuses settings of the replay that the others leave without effect."""
    if not settings.replay_share:
        names = ["buckets", "pool_range", "pick_by", "pick", "importance"]
        refuse_unread("method", settings, names, "with method.replay_share=0")
    if settings.pick_by == "random":
        refuse_unread("method", settings, ["pick"], "with method.pick_by=random")
