"""Responses of several turns: the policy calls tools, reads their answers and goes on, within one response.

What tools and template write between two turns belongs to the response but not to the policy: it has no log-probs, no loss sees it, and no
verifier judges it. Each turn of a response has a seed of its own; the first one's is the response's, so a response without calls is the
same with tools and without.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from postgrad.problem import Problem
from postgrad.rollout.engine import Completion, Engine, Request, Sampling, limit_of, trajectory_seed
from postgrad.rollout.tools import CLOSING, ERROR, Call, Toolbox, calls_in


class Script(Protocol):
    """Text of turns to tokens and back."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_tool_answers(self, answers: Sequence[str], end: int) -> list[int]: ...


@dataclass(frozen=True)
class Turns:
    """The tools of a run, and how often a response may turn to them."""

    tools: Toolbox
    script: Script
    most: int


@dataclass
class _Talk:
    """One response on its way."""

    prompt: list[int]
    seed: int
    limit: int
    problem: Problem
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    finish: str = "stop"
    turns: int = 0
    calls: int = 0
    errors: int = 0
    asked: list[Call] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def say(self, done: Completion, script: Script) -> None:
        """The policy's turn; `asked` are its calls, if it was ended by itself."""
        self.tokens += done.tokens
        self.logprobs += done.logprobs
        self.written += [True] * len(done.tokens)
        self.finish, self.turns = done.finish, self.turns + 1
        self.asked = calls_in(_text(done.tokens, script)) if done.finish == "stop" else []

    def hear(self, answers: list[str], script: Script) -> bool:
        """The tools' answers. False when they leave no room for another turn: the response then ends with its calls, by length."""
        self.calls += len(answers)
        self.errors += sum(answer.startswith(ERROR) for answer in answers)
        heard = script.encode_tool_answers(answers, self.tokens[-1])
        if len(self.tokens) + len(heard) >= self.limit:
            self.finish = "length"
            return False
        self.tokens += heard
        self.logprobs += [0.0] * len(heard)
        self.written += [False] * len(heard)
        return True

    def next_request(self) -> Request:
        seed = trajectory_seed(self.seed, self.turns, "turn", 0)
        return Request([*self.prompt, *self.tokens], [seed], self.limit - len(self.tokens))

    def completion(self) -> Completion:
        return Completion(
            self.tokens,
            self.logprobs,
            self.finish,
            self.written,
            self.turns,
            self.calls,
            self.errors,
        )


def _text(tokens: list[int], script: Script) -> str:
    """A turn without the token that ended it, unless that is the end of a call."""
    text = script.decode_raw(tokens)
    return text if text.rstrip().endswith(CLOSING) else script.decode_raw(tokens[:-1])


def run_turns(
    engine: Engine,
    requests: Sequence[Request],
    problems: Sequence[Problem],
    sampling: Sampling,
    turns: Turns | None,
) -> list[list[Completion]]:
    """What engine.generate gives for the requests; with tools, responses that go on after their calls were answered.

    The rows that called are answered together and sampled together, turn after turn.
    """
    first = engine.generate(requests, sampling)
    if turns is None:
        return first
    talks: list[list[_Talk]] = []
    for request, problem, completions in zip(requests, problems, first, strict=True):
        limit = limit_of(request, sampling)
        group = [_Talk(request.prompt, seed, limit, problem) for seed in request.seeds]
        for talk, done in zip(group, completions, strict=True):
            talk.say(done, turns.script)
        talks.append(group)
    everybody = [talk for group in talks for talk in group]
    while waiting := [talk for talk in everybody if talk.asked and talk.turns < turns.most]:
        answers = turns.tools.answer_all(
            [(talk.asked, talk.problem, talk.state) for talk in waiting]
        )
        for talk in waiting:
            talk.asked = []
        going_on = [
            talk
            for talk, heard in zip(waiting, answers, strict=True)
            if talk.hear(heard, turns.script)
        ]
        found = (
            engine.generate([talk.next_request() for talk in going_on], sampling)
            if going_on
            else []
        )
        for talk, (done,) in zip(going_on, found, strict=True):
            talk.say(done, turns.script)
    return [[talk.completion() for talk in group] for group in talks]
