"""What a verifier needs to know: Problem, Score, Failure. Imports no torch, so that a verifier's child process stays light."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One row of a data set. `uid` is stable: it follows the problem through shuffling, resume, rollouts and dumps."""

    uid: str
    messages: tuple[dict[str, str], ...]
    ground_truth: str
    data_source: str = ""
    demonstrations: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A verifier's judgment: the reward, and the named parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A response that could not be judged. `kind` is countable (timeout, crash, judge ...), `reason` is for people."""

    kind: str
    reason: str
