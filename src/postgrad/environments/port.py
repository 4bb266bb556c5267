"""The environment port, and what environments return, as plain values that cross processes.

An environment is a class. Each trajectory has its own object, made with the settings of
`environment.options` as arguments. It needs `reset`, and `step` or at least one tool:

    class Environment:
        def reset(self, problem, seed) -> str | None    # text for the end of the prompt
        def step(self, action) -> (observation, reward, done)
        def score(self) -> float                        # optional, once at the end
        def get_state(self) -> dict                     # optional, for verifiers and rollouts

In place of a text there may be a picture of Pillow, or a list of parts {type: text, text} and
{type: image, image}. Arguments of `reset` that it does not name are not passed. A reward is
whatever a verifier may return: a number, a bool, or a dict with `score` and named parts. None is a
failure. Every other public method is a tool that the policy may call.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

from postgrad.errors import Missing
from postgrad.pictures import PictureError, image_parts, shown_parts, without_pictures
from postgrad.problem import Failure, Message, Score
from postgrad.verifiers.port import as_score

# Methods that are part of the protocol; all other public methods are tools.
PROTOCOL = ("reset", "step", "score", "get_state", "close")


# A text, or parts {type: text, text} and {type: image, image} with data URLs.
Shown = str | list[dict[str, Any]]

# Names of NumPy's type, which is not a number in Python's sense.
NUMPY_BOOL = ("bool", "bool_")


class EnvironmentFailure(Exception):
    """An environment broke the protocol, raised, or took too long; becomes a Failure."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)


@dataclass(frozen=True)
class Observation:
    """What follows a turn of the policy.

    Attributes:
        messages: the messages after the turn, with role `user` (an environment) or `tool`.
        images: the pictures of their parts {type: image} as data URLs, in order.
        reward: the reward of the turn.
        parts: named parts of the reward.
        done: the trajectory ends here.
        calls: number of tool calls that were answered.
        errors: number of tool calls that failed.
    """

    messages: tuple[Message, ...] = ()
    images: tuple[str, ...] = ()
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    done: bool = False
    calls: int = 0
    errors: int = 0

    def __post_init__(self) -> None:
        # A tuple becomes a list when it crosses a process boundary.
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "images", tuple(self.images))

    @staticmethod
    def of(messages: Sequence[Message], **fields: Any) -> "Observation":
        """Return the observation of messages whose parts {type: image} hold their pictures."""
        images = tuple(part["image"] for part in image_parts(messages))
        return Observation(tuple(map(without_pictures, messages)), images, **fields)


@dataclass(frozen=True)
class Outcome:
    """The result of score() and get_state() at the end of a trajectory."""

    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    state: Any = None


def tool_methods(environment_class: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that are tools, by name, in order of definition."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(environment_class.__mro__[:-1]):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_") and name not in PROTOCOL:
                methods[name] = value
    return methods


def is_environment(value: Any) -> bool:
    """Return whether a value is a class with reset, and step or a tool."""
    if not isinstance(value, type) or not callable(getattr(value, "reset", None)):
        return False
    return callable(getattr(value, "step", None)) or bool(tool_methods(value))


def read_step(result: Any) -> tuple[Shown, Score, bool]:
    """Return (observation, reward, done) of what step() returned. Raises EnvironmentFailure."""
    if not isinstance(result, tuple | list) or len(result) != 3:
        kind = type(result).__name__
        if isinstance(result, tuple | list):
            kind += f" of {len(result)} values"
        raise EnvironmentFailure(
            "invalid", f"step returned {kind}; return (observation, reward, done)"
        )
    observation, reward, done = result
    return read_shown(observation, "step"), read_reward(reward, "step"), read_done(done)


def read_shown(value: Any, method: str) -> Shown:
    """Return an observation: a text, or parts with pictures; None is empty.

    Raises EnvironmentFailure for other types, and for pictures that cannot be shown.
    """
    if value is None or isinstance(value, str):
        return value or ""
    try:
        parts = shown_parts(value)
    except PictureError as error:
        raise EnvironmentFailure("invalid", f"{method} returned a picture: {error}") from error
    if parts is None:
        raise EnvironmentFailure(
            "invalid",
            f"{method} returned {type(value).__name__} as observation, not a str or parts with "
            "pictures (data URLs, bytes or those of Pillow)",
        )
    return parts


def read_done(value: Any) -> bool:
    """Return whether the trajectory ends. Raises EnvironmentFailure unless it is a bool, 0 or 1."""
    is_integral = isinstance(value, Integral) or type(value).__name__ in NUMPY_BOOL
    if not is_integral or int(value) not in (0, 1):
        raise EnvironmentFailure(
            "invalid",
            f"step returned {type(value).__name__} {str(value)[:40]!r} as done, not a bool; "
            "return (observation, reward, done)",
        )
    return bool(value)


def read_reward(value: Any, method: str) -> Score:
    """Return a reward as a Score. Raises EnvironmentFailure if it is no finite number."""
    if value is None:
        raise EnvironmentFailure(
            "invalid", f"{method} returned None as reward; return 0.0 if there is none"
        )
    score = as_score(value)
    if isinstance(score, Failure):
        reason = score.reason.replace("the verifier", "the environment")
        raise EnvironmentFailure(score.kind, reason)
    return score


def add_parts(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Return the sums of named parts."""
    names = [*first, *(name for name in second if name not in first)]
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in names}


class RewardSource(Protocol):
    """The environments or the agents of a run."""

    @property
    def has_environment(self) -> bool:
        """Whether there is a reward besides those of verifiers."""
        ...


def choose_verifier(verifier: str, source: RewardSource | None) -> str:
    """Return the verifier of a run: `auto` is the environment's own reward, if there is one.

    The reward that an agent prints counts as an environment's.

    Raises ConfigError if the setting names the reward of an environment that does not exist.
    """
    has_environment = source is not None and source.has_environment
    if verifier == "auto" and has_environment:
        return "environment"
    if re.search(r"\benvironment\b", verifier) and ":" not in verifier and not has_environment:
        raise Missing(
            f"reward.verifier={verifier}: the run has no environment; "
            "add environment=file.py:Class, or remove the term"
        )
    return verifier
