import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postgrad.problem import Problem
from postgrad.rewards.pool import VerifierPool

HERE = Path(__file__).parent


def make_problem(truth: str, source: str = "math", **fields: object) -> Problem:
    return Problem(uid="p1", messages=({"role": "user", "content": "?"},), ground_truth=truth, data_source=source, **fields)  # type: ignore[arg-type]


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def math_pool() -> Iterator[VerifierPool]:
    """One pool for all tests of maths, so that sympy loads once."""
    with VerifierPool(workers=1, timeout_s=30) as pool:
        yield pool


@pytest.fixture(scope="session")
def grade(math_pool: VerifierPool) -> Callable[..., list[float]]:
    """Values of (response, truth) pairs by a verifier that runs in the pool."""

    def values(verifier: str, pairs: list[tuple[str, str]]) -> list[float]:
        results = math_pool.judge([(response, make_problem(truth)) for response, truth in pairs], [verifier] * len(pairs))
        return [result.value for result in results]  # type: ignore[union-attr]

    return values


@pytest.fixture
def hostile() -> Callable[[str], str]:
    """The name of a function in hostile_verifiers.py as a user would give it."""
    return lambda name: f"{HERE / 'hostile_verifiers.py'}:{name}"


def living_children(pid: int | None = None) -> list[int]:
    """Children of a process, the dead ones that nobody collected included."""
    tasks = Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.fixture
def children() -> Callable[..., list[int]]:
    return living_children
