"""A test verifier, run in the pool's processes: 1 if algebra alone matches gold with itself."""

from postgrad.problem import Problem
from postgrad.verifiers.grading.algebra import parse_latex, same_algebra
from postgrad.verifiers.grading.equality import split_unit


def reads_gold(response: str, problem: Problem) -> float:
    gold = split_unit(problem.ground_truth)[0]
    return float(parse_latex(gold) is not None and same_algebra(gold, gold))
