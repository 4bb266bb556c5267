import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postgrad.problem import Problem
from postgrad.rewards.score import Judge

HERE = Path(__file__).parent


def make_problem(truth: str, source: str = "math", **fields: object) -> Problem:
    return Problem(uid="p1", messages=({"role": "user", "content": "?"},), ground_truth=truth, data_source=source, **fields)  # type: ignore[arg-type]


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def grade() -> Iterator[Callable[..., list[float]]]:
    """Values of (response, truth) pairs by a verifier that runs in the pool; one pool for all tests, so sympy loads once."""
    judges: dict[str, Judge] = {}

    def values(verifier: str, pairs: list[tuple[str, str]]) -> list[float]:
        judge = judges.setdefault(verifier, Judge(verifier, timeout_s=20, workers=2))
        results = judge.score([make_problem(truth) for _, truth in pairs], [response for response, _ in pairs])
        return [result.value for result in results]  # type: ignore[union-attr]

    yield values
    for judge in judges.values():
        judge.close()


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
