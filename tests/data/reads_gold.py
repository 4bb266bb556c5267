"""A test verifier, run in the pool's processes: 1 if algebra alone matches gold with itself."""

from math_verify import verify

from postgrad.problem import Problem
from postgrad.verifiers.equality import split_unit
from postgrad.verifiers.math import parse_latex


def reads_gold(response: str, problem: Problem) -> float:
    parsed = parse_latex(split_unit(problem.ground_truth)[0])
    return float(bool(parsed) and bool(verify(parsed, parsed, timeout_seconds=None)))
