"""Checks of Classmate-CoT's settings, before a run writes anything. All raise ConfigError."""

from postgrad.errors import ConfigError
from postgrad.methods.method import Method
from postgrad.verifiers.model_terms import asks_judge

HELP_OTHER = "help_other_questions"  # a value of method.reward_type
# Settings with one entry per classmate, or none.
PER_CLASSMATE = ("classmate_shares", "classmate_cot_start", "classmate_cot_end")


def check(method: Method) -> None:
    """Refuses settings that do not fit together."""
    settings = method.settings
    count = len(settings.classmates)
    if not count:
        raise ConfigError(
            "method.classmates is empty; name at least one, or use method.condition=no_classmate"
        )
    for key in PER_CLASSMATE:
        num_entries = len(getattr(settings, key))
        if num_entries not in (0, count):
            raise ConfigError(
                f"method.{key} has {num_entries} entries for {count} classmates; "
                "give one per classmate, or none"
            )
    if settings.consistency_weight and asks_judge(method.config.reward.verifier):
        raise ConfigError(
            "method.consistency_weight compares answers, which reward.verifier=llm_judge does "
            "not; set it to 0"
        )
    needs_partners = settings.reward_type == HELP_OTHER
    if needs_partners and (method.config.training.problems_per_step < 2 or settings.max_refills):
        raise ConfigError(
            f"method.reward_type={HELP_OTHER} pairs the problems of a step; it needs "
            "training.problems_per_step of at least 2, and method.max_refills=0"
        )
