"""The calls of one agent as trajectories of tokens.

A call whose messages continue those of an earlier call, with the reply that it got, continues the
trajectory of that call: the sampled tokens stay as they are, and only what follows is encoded. So
does a prompt whose tokens begin with all tokens of a trajectory. Every other call, such as a
sub-agent's or one of an edited conversation, begins another trajectory.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from postgrad.errors import ConfigError
from postgrad.problem import Message
from postgrad.rollout.engine import Completion, Episode, Request, Sampling, trajectory_seed
from postgrad.rollout.native.jobs import LiveJob
from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import ApiError, ChatRequest, GenerationRequest
from postgrad.serving.responses import ResponseBuilder
from postgrad.serving.responses_api import make_builder
from postgrad.serving.tool_calls import template_message
from postgrad.serving.worker import RowUpdate

ANSWERS = ("user", "tool")  # roles of messages that may follow a reply
TEMPLATE_ERRORS = (TemplateError, ConfigError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Limits:
    """Limits of one agent: tokens of a response, of prompt and response, and number of calls."""

    max_response_tokens: int
    max_tokens: int
    max_calls: int


@dataclass(eq=False)
class Trajectory:
    """One conversation: the prompt of its first call, and everything after it."""

    prompt: list[int]
    conditions: str  # tools and options of the chat template: others make another conversation
    question: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    finish: str = "stop"
    history: list[Any] = field(default_factory=list)  # all messages, in a form to compare
    messages: list[Message] = field(default_factory=list)  # those after the prompt
    turn_ends: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    # A call continues it now. It stays so if the client has gone before the reply: the tokens of
    # that call are in no trajectory, and a repeated call begins another one.
    is_busy: bool = False

    @property
    def all_tokens(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(eq=False)
class Call:
    """A call that waits for its tokens. `ids` is the full prompt for the engine."""

    request: GenerationRequest
    trajectory: Trajectory
    ids: list[int]
    seed: int
    limit: int

    @property
    def engine_request(self) -> Request:
        return Request(self.ids, [self.seed], self.limit)


class Recording:
    """All calls of one program.

    Args:
        text: encodes and decodes with the policy's tokenizer.
        seed: of the trajectory; the calls' seeds follow from it and their order.
        limits: how many tokens and calls there may be.
    """

    def __init__(self, text: ModelText, seed: int, limits: Limits) -> None:
        self.text = text
        self.seed = seed
        self.limits = limits
        self.trajectories: list[Trajectory] = []  # in the order of their last turns
        self.answer: str | None = None  # the last reply
        self.num_calls = 0
        self.hit_limit = False  # a call was refused because of the limits
        self._lock = threading.Lock()

    def start(self, request: GenerationRequest) -> Call:
        """Return the call of a request. Raises ApiError if it cannot be made."""
        with self._lock:
            if self.num_calls >= self.limits.max_calls:
                self.hit_limit = True
                raise ApiError(
                    400, f"the agent has made agent.max_calls={self.limits.max_calls} calls"
                )
            trajectory, ids = self._find(request)
            num_response = len(ids) - len(trajectory.prompt)
            tokens_left = min(
                self.limits.max_response_tokens - num_response, self.limits.max_tokens - len(ids)
            )
            if tokens_left < 1:
                self.hit_limit = True
                raise ApiError(
                    400,
                    f"the conversation has {len(ids)} tokens, {num_response} of them after its "
                    "first prompt; raise rollout.max_response_tokens or data.max_prompt_tokens",
                    code="context_length_exceeded",
                )
            seed = trajectory_seed(self.seed, self.num_calls, "call", 0)
            self.num_calls += 1
            trajectory.is_busy = True
            max_tokens = min(tokens_left, request.token_limit or tokens_left)
            return Call(request, trajectory, ids, seed, max_tokens)

    def finish(self, call: Call, completion: Completion) -> ResponseBuilder:
        """Add the sampled tokens to the trajectory; returns the response to the program."""
        builder = self._make_builder(call, completion)
        with self._lock:
            trajectory = call.trajectory
            num_new = len(call.ids) - len(trajectory.all_tokens)
            if num_new:
                trajectory.tokens += call.ids[-num_new:]
                trajectory.logprobs += [0.0] * num_new
                trajectory.policy_mask += [False] * num_new
            trajectory.tokens += completion.tokens
            trajectory.logprobs += completion.logprobs
            trajectory.policy_mask += [True] * len(completion.tokens)
            trajectory.finish = completion.finish
            trajectory.turn_ends.append(len(trajectory.tokens))
            self._add_messages(trajectory, call.request, builder)
            trajectory.is_busy = False
            if trajectory in self.trajectories:
                self.trajectories.remove(trajectory)
            self.trajectories.append(trajectory)
            self.answer = builder.choices[0].text
        return builder

    def completions(self) -> list[Completion]:
        """Return all trajectories; the one with the last reply comes first."""
        with self._lock:
            return [_completion(trajectory, self.answer) for trajectory in self.trajectories[::-1]]

    def _find(self, request: GenerationRequest) -> tuple[Trajectory, list[int]]:
        """Return the trajectory that a request continues, or a new one, and the prompt's tokens."""
        conditions = _conditions(request)
        history = [_comparable(message) for message in _messages(request)]
        for trajectory in reversed(self.trajectories):
            if trajectory.conditions != conditions or trajectory.is_busy:
                continue
            rest = _messages(request)[len(trajectory.history) :]
            if rest and history[: len(trajectory.history)] == trajectory.history:
                added = self._encode_rest(request, rest, trajectory.tokens[-1])
                if added:
                    return trajectory, [*trajectory.all_tokens, *added]
        ids = self.text.encode(request, request.prompts[0])
        for trajectory in sorted(self.trajectories, key=lambda one: -len(one.all_tokens)):
            known = trajectory.all_tokens
            if not trajectory.is_busy and len(ids) > len(known) and ids[: len(known)] == known:
                return trajectory, ids
        messages = _messages(request)
        question = str(messages[-1]["content"]) if messages else str(request.prompts[0])
        return Trajectory(ids, conditions, question), ids

    def _encode_rest(self, request: GenerationRequest, rest: list[Message], end: int) -> list[int]:
        """Return the tokens of messages after a reply; [] if they cannot follow one."""
        if any(message["role"] not in ANSWERS for message in rest):
            return []
        try:
            with self.text.lock:
                return self.text.prompts_for(request).encode_after_turn(rest, end)
        except TEMPLATE_ERRORS:
            return []

    def _make_builder(self, call: Call, completion: Completion) -> ResponseBuilder:
        job = LiveJob(call.engine_request, Sampling())
        builder = make_builder(call.request, self.text, [job])
        builder.add(RowUpdate(0, 0, completion.tokens, completion.logprobs, [], completion.finish))
        return builder

    def _add_messages(
        self, trajectory: Trajectory, request: GenerationRequest, builder: ResponseBuilder
    ) -> None:
        messages = _messages(request)
        choice = builder.choices[0]
        if not messages:  # a completion of a text
            trajectory.messages.append({"role": "assistant", "content": choice.text})
            trajectory.states.append(_state(trajectory.question))
            return
        fields = builder.message_fields(choice)
        reply = template_message({"role": "assistant", **fields})
        if trajectory.history:
            trajectory.messages += messages[len(trajectory.history) :]
        trajectory.messages.append({"role": "assistant", "content": choice.text})
        trajectory.states.append(_state(str(messages[-1]["content"])))
        trajectory.history = [_comparable(message) for message in [*messages, reply]]


def _completion(trajectory: Trajectory, answer: str | None) -> Completion:
    num_turns = len(trajectory.turn_ends)
    episode = Episode(
        prompt=trajectory.prompt,
        question=trajectory.question,
        rewards=[0.0] * num_turns,
        turn_ends=trajectory.turn_ends,
        states=trajectory.states,
        done=True,
        answer=answer,
    )
    return Completion(
        tokens=trajectory.tokens,
        logprobs=trajectory.logprobs,
        finish=trajectory.finish,
        policy_mask=trajectory.policy_mask,
        turns=num_turns,
        messages=trajectory.messages,
        episode=episode,
    )


def _messages(request: GenerationRequest) -> list[Message]:
    """Return the messages of a chat; [] for a completion."""
    return list(request.prompts[0]) if request.is_chat else []


def _conditions(request: GenerationRequest) -> str:
    options = request.chat_template_kwargs if isinstance(request, ChatRequest) else {}
    return json.dumps([request.is_chat, request.tool_schemas, options], sort_keys=True)


def _comparable(message: Message) -> Any:
    """Return what decides whether two messages are the same: role, text and tool calls."""
    calls: list[Any] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        calls.append([function.get("name"), function.get("arguments")])
    return [message["role"], str(message.get("content") or "").strip(), calls]


def _state(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
