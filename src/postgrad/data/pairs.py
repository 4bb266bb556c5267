"""Problems that the data pair with another: `paired_similar_q` and `paired_similar_q_gt`, the question and its answer."""

from dataclasses import replace

from postgrad.errors import ConfigError
from postgrad.problem import Problem


def paired_problem(problem: Problem) -> Problem:
    """The problem that the data pair with this one. Raises ConfigError where there is none."""
    for extra in (
        problem.extra,
        problem.extra.get("extra_info"),
        problem.extra.get("reward_model"),
    ):
        if (
            isinstance(extra, dict)
            and extra.get("paired_similar_q")
            and extra.get("paired_similar_q_gt")
        ):
            messages = ({"role": "user", "content": str(extra["paired_similar_q"])},)
            return replace(
                problem,
                uid=f"{problem.uid}/similar",
                messages=messages,
                ground_truth=str(extra["paired_similar_q_gt"]),
            )
    raise ConfigError(
        f"problem {problem.uid} has no paired_similar_q and paired_similar_q_gt; method.reward_type=help_other_similar_questions needs them"
    )
