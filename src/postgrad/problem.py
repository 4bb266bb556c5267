"""What a verifier needs to know: Problem, Score, Failure. Imports no torch, so that a verifier's child process stays light."""

from dataclasses import dataclass, field
from typing import Any

# One message of a conversation: role, content, and what the chat template reads besides.
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A whole conversation to imitate, as the chat template renders it.

    Attributes:
        messages: all messages; an assistant message may have `tool_calls` and a null content.
        tools: JSON schemas of the tools that the template shows to the model.
        num_prompt: number of leading messages that are the prompt and never trained on.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    num_prompt: int = 0


@dataclass(frozen=True)
class Problem:
    """One row of a data set. `uid` is stable: it follows the problem through shuffling, resume, rollouts and dumps."""

    uid: str
    messages: tuple[Message, ...]
    ground_truth: str
    data_source: str = ""
    demonstrations: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None


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
