"""The reward of an environment as a verifier, so that sums may contain it."""

from postgrad.problem import Failure, Problem, Score


def environment(response: str, problem: Problem) -> Score | Failure:
    """Return the sum of the rewards of all turns and of score(), with their named parts."""
    result = problem.extra.get("environment")
    if not isinstance(result, dict) or "reward" not in result:
        return Failure("invalid", "the run has no environment; set environment=file.py:Class")
    return Score(float(result["reward"]), dict(result["parts"]))
