"""Problems that the data pair with another one, in `paired_similar_q` and `paired_similar_q_gt`."""

from dataclasses import replace
from typing import Any

from postgrad.data.ground_truth import with_ground_truth
from postgrad.errors import Missing
from postgrad.pictures import text_of_content
from postgrad.problem import Problem, problem_label


def paired_problem(problem: Problem) -> Problem:
    """Return the similar problem that the data give for this one: question and ground truth.

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
            similar = with_ground_truth(problem, str(truth))
            return replace(
                similar,
                uid=f"{problem.uid}/similar",
                messages=({"role": "user", "content": str(question)},),
                images=(),
                row=_with_question(similar, str(question)),
            )
    raise Missing(
        f"{problem_label(problem)} has no paired_similar_q and paired_similar_q_gt; "
        "method.reward_type=help_other_similar_questions needs both columns",
        at="paired_similar_q",
    )


def _with_question(problem: Problem, question: str) -> dict[str, Any]:
    """Return the columns of the problem's row; those with its question have this one."""
    old = text_of_content(problem.messages[-1]["content"])
    return {name: question if value == old else value for name, value in problem.row.items()}
