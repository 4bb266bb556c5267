"""Scores answers to problems of reasoning-gym with the generator's own scorer."""

import re

from postgrad.gym import make_dataset
from postgrad.problem import Failure, Problem, Score

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(response: str, problem: Problem) -> Score | Failure:
    """Return the generator's score of the text in the last <answer> tags; 0 without them.

    The entry is generated again from its index, because scorers need its metadata as it was.
    """
    source = problem.extra.get("reasoning_gym")
    if not isinstance(source, dict):
        return Failure("invalid", "the problem is not from data.train=reasoning_gym:NAME")
    answers = ANSWER.findall(response)
    if not answers:
        return Score(0.0, {"answered": 0.0})
    dataset = make_dataset(source["name"], source["settings"])
    value = dataset.score_answer(answers[-1].strip(), dataset[source["index"]])
    return Score(float(value), {"answered": 1.0})
