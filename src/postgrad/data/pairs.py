"""Problems that the data pair with another one, in `paired_similar_q` and `paired_similar_q_gt`."""

from dataclasses import replace

from postgrad.errors import ConfigError
from postgrad.problem import Problem


def paired_problem(problem: Problem) -> Problem:
    """The similar problem that the data give for this one: its question and its ground truth.

    Raises:
        ConfigError: the problem has no paired one.
    """
    sources = (
        problem.extra,
        problem.extra.get("extra_info"),
        problem.extra.get("reward_model"),
    )
    for source in sources:
        if not isinstance(source, dict):
            continue
        question = source.get("paired_similar_q")
        truth = source.get("paired_similar_q_gt")
        if question and truth:
            return replace(
                problem,
                uid=f"{problem.uid}/similar",
                messages=({"role": "user", "content": str(question)},),
                ground_truth=str(truth),
            )
    raise ConfigError(
        f"problem {problem.uid} has no paired_similar_q and paired_similar_q_gt; "
        "method.reward_type=help_other_similar_questions needs both columns"
    )
