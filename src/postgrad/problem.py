"""Problem, Score and Failure: what a verifier reads and returns.

Imports no torch, so that the child processes of verifiers start fast.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One row of a data set.

    `uid` is stable: it stays the same through shuffling, resuming, rollouts and dumps.
    """

    uid: str
    messages: tuple[dict[str, str], ...]
    ground_truth: str
    data_source: str = ""
    demonstrations: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A verifier's result: the reward, and the named parts that it consists of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A response that could not be scored.

    `kind` is for counting (timeout, crash, judge ...), `reason` is for people.
    """

    kind: str
    reason: str
