"""Settings of Classmate-CoT, and the panel of classmates that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.classmate_rewards import CONDITIONS
from postgrad.config.schema import setting
from postgrad.methods.support.thinking import ThinkingSettings
from postgrad.rollout.engine import Sampling
from postgrad.rollout.generator import Generator
from postgrad.rollout.panel import Panel

HELP_OTHER = "help_other_questions"
HELP_SIMILAR = "help_other_similar_questions"
ESTIMATORS = tuple(name for name, one in ADVANTAGES.items() if "classmate" in one.needs)
REWARD_TYPES = ("vanilla", "random_truncate", "remove_wo_cot", HELP_OTHER, HELP_SIMILAR)


@dataclass
class ClassmateSettings(ThinkingSettings):
    advantage: str = setting(
        "classmate_with", "how the two rewards become advantages", choices=ESTIMATORS
    )
    normalize_by_std: bool = setting(False, "divide a group's advantages by its standard deviation")
    normalize_answer: bool = setting(
        False, "classmate_gdpo: normalize the answer's advantages over the batch too"
    )
    classmates: list[str] = setting(
        [""], "their models: paths, URLs, policy:live; empty: the starting policy, frozen"
    )
    classmate_shares: list[float] = setting(
        [], "weights of the classmates; empty: equal", above=0.0
    )
    classmate_samples: int = setting(1, "continuations per classmate", at_least=1)
    classmate_temperature: float = setting(1.0, "temperature; 0 is greedy", at_least=0.0)
    classmate_top_p: float = setting(1.0, "nucleus sampling", above=0.0, at_most=1.0)
    classmate_max_tokens: int = setting(256, "longest continuation, in tokens", at_least=1)
    classmate_cot_start: list[str] = setting(
        [], "opening marker per classmate; empty: cot_start for all"
    )
    classmate_cot_end: list[str] = setting([], "closing marker per classmate; empty: cot_end")
    classmate_weight: float = setting(
        1.0, "weight of their reward, after normalization; 0 only measures it", at_least=0.0
    )
    classmate_tokens: str = setting(
        "cot", "tokens that their reward applies to", choices=("cot", "all")
    )
    reward_type: str = setting(
        "vanilla", "what the classmates are asked; see docs/methods.md", choices=REWARD_TYPES
    )
    condition: str = setting(
        "no_classmate_when_main_incorrect", "when their reward counts", choices=CONDITIONS
    )
    consistency_weight: float = setting(
        0.0, "weight of the reward for leading classmates to the policy's answer", at_least=0.0
    )


def open_panel(settings: ClassmateSettings, generators: Sequence[Generator], seed: int) -> Panel:
    """The classmates, each with its markers of a thought."""
    count = len(generators)
    return Panel(
        "classmate",
        generators,
        settings.classmate_cot_start or [settings.cot_start] * count,
        settings.classmate_cot_end or [settings.cot_end] * count,
        Sampling(
            settings.classmate_temperature,
            settings.classmate_max_tokens,
            settings.classmate_top_p,
        ),
        settings.classmate_samples,
        seed,
    )
