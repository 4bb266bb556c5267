"""Responses of several turns: the policy calls tools, reads their answers and continues.

What the tools and the chat template write between two turns is part of the response but not of the
policy: it has no log-probs, no loss, and verifiers do not see it. Each turn has its own seed. The
seed of the first turn is the response's seed, so tools do not change a response without calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from postgrad.problem import Problem
from postgrad.rollout.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    token_limit,
    trajectory_seed,
)
from postgrad.rollout.tools import CLOSING, ERROR, Call, Toolbox, parse_calls


class TurnPrompts(Protocol):
    """Text of turns to token ids and back."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_tool_answers(self, answers: Sequence[str], end: int) -> list[int]: ...


@dataclass(frozen=True)
class Turns:
    """The tools of a run, and the largest number of turns per response."""

    tools: Toolbox
    prompts: TurnPrompts
    max_turns: int


@dataclass
class _Conversation:
    """One response that is being sampled, turn by turn."""

    prompt: list[int]
    seed: int
    limit: int  # tokens of the response
    problem: Problem
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    finish: str = "stop"
    num_turns: int = 0
    num_calls: int = 0
    num_errors: int = 0
    pending_calls: list[Call] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def add_policy_turn(self, completion: Completion, prompts: TurnPrompts) -> None:
        """Append the policy's turn. A turn that was cut at the length makes no calls."""
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.policy_mask += [True] * len(completion.tokens)
        self.finish = completion.finish
        self.num_turns += 1
        if completion.finish == "stop":
            self.pending_calls = parse_calls(_turn_text(completion.tokens, prompts))

    def add_tool_answers(self, answers: list[str], prompts: TurnPrompts) -> bool:
        """Append the answers to the pending calls.

        Returns False when they leave no tokens for another turn: the response then ends with its
        calls and counts as cut at the length.
        """
        self.pending_calls = []
        self.num_calls += len(answers)
        self.num_errors += sum(answer.startswith(ERROR) for answer in answers)
        answer_tokens = prompts.encode_tool_answers(answers, self.tokens[-1])
        if len(self.tokens) + len(answer_tokens) >= self.limit:
            self.finish = "length"
            return False
        self.tokens += answer_tokens
        self.logprobs += [0.0] * len(answer_tokens)
        self.policy_mask += [False] * len(answer_tokens)
        return True

    def next_request(self) -> Request:
        seed = trajectory_seed(self.seed, self.num_turns, "turn", 0)
        return Request([*self.prompt, *self.tokens], [seed], self.limit - len(self.tokens))

    def completion(self) -> Completion:
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish=self.finish,
            policy_mask=self.policy_mask,
            turns=self.num_turns,
            calls=self.num_calls,
            errors=self.num_errors,
        )


def _turn_text(tokens: list[int], prompts: TurnPrompts) -> str:
    """Return a turn's text without the token that ended it, unless that token closes a call."""
    text = prompts.decode_raw(tokens)
    return text if text.rstrip().endswith(CLOSING) else prompts.decode_raw(tokens[:-1])


def run_turns(
    engine: Engine,
    requests: Sequence[Request],
    problems: Sequence[Problem],
    sampling: Sampling,
    turns: Turns | None,
) -> list[list[Completion]]:
    """Return the completions of each request; with `turns`, the policy may call tools in them.

    All rows with calls are answered together and sampled together, turn by turn.
    """
    first_turns = engine.generate(requests, sampling)
    if turns is None:
        return first_turns
    groups: list[list[_Conversation]] = []
    for request, problem, completions in zip(requests, problems, first_turns, strict=True):
        limit = token_limit(request, sampling)
        group: list[_Conversation] = []
        for seed, completion in zip(request.seeds, completions, strict=True):
            conversation = _Conversation(request.prompt, seed, limit, problem)
            conversation.add_policy_turn(completion, turns.prompts)
            group.append(conversation)
        groups.append(group)
    conversations = [conversation for group in groups for conversation in group]
    while calling := [c for c in conversations if _may_continue(c, turns)]:
        answers = turns.tools.answer_all([(c.pending_calls, c.problem, c.state) for c in calling])
        continuing: list[_Conversation] = []
        for conversation, own_answers in zip(calling, answers, strict=True):
            if conversation.add_tool_answers(own_answers, turns.prompts):
                continuing.append(conversation)
        if not continuing:
            break
        results = engine.generate([c.next_request() for c in continuing], sampling)
        for conversation, (completion,) in zip(continuing, results, strict=True):
            conversation.add_policy_turn(completion, turns.prompts)
    return [[conversation.completion() for conversation in group] for group in groups]


def _may_continue(conversation: _Conversation, turns: Turns) -> bool:
    return bool(conversation.pending_calls) and conversation.num_turns < turns.max_turns
