"""The calls of one agent as trajectories of tokens.

A call whose messages continue those of an earlier call, with the reply that it got, continues the
trajectory of that call: the sampled tokens stay as they are, and only what follows is encoded. So
does a prompt whose tokens begin with all tokens of a trajectory. Every other call, such as a
sub-agent's or one of an edited conversation, begins another trajectory.
"""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from postgrad.errors import ConfigError
from postgrad.pictures import Picture, image_parts, text_of_content, without_pictures
from postgrad.problem import Message
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.transcript import Transcript
from postgrad.rollout.turns import Turn
from postgrad.serving.model_text import ModelText, pictures_of
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
class Trajectory(Transcript):
    """One conversation: the prompt of its first call, and everything after it."""

    number: int = 0  # in the order of the first calls
    conditions: str = ""  # tools and options of the template: others make another conversation
    history: list[Any] = field(default_factory=list)  # all messages, in a form to compare
    # A call continues it now. It stays so if the client has gone before the reply: the tokens of
    # that call are in no trajectory, and a repeated call begins another one.
    is_busy: bool = False


@dataclass(eq=False)
class Call:
    """A call that waits for its tokens; `turn` is what the engine gets."""

    request: GenerationRequest
    trajectory: Trajectory
    turn: Turn


class Recording:
    """All calls of one program.

    Args:
        number: of the program.
        text: encodes and decodes with the policy's tokenizer.
        seed: of the trajectory; the calls' seeds follow from it and their order.
        limits: how many tokens and calls there may be.
    """

    def __init__(self, number: int, text: ModelText, seed: int, limits: Limits) -> None:
        self.number = number
        self.text = text
        self.seed = seed
        self.limits = limits
        self.trajectories: list[Trajectory] = []  # in the order of their last turns
        self.num_trajectories = 0  # begun ones
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
            pictures = pictures_of(request, request.prompts[0])
            trajectory, ids = self._find(request, pictures)
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
            turn = Turn(
                (self.number, trajectory.number),
                Request(ids, [seed], max_tokens, pictures),
                tuple(request.stop),
                continues=bool(trajectory.tokens),
            )
            return Call(request, trajectory, turn)

    def finish(self, call: Call, completion: Completion) -> ResponseBuilder:
        """Add the sampled tokens to the trajectory; returns the response to the program."""
        builder = self._make_builder(call, completion)
        choice = builder.choices[0]
        with self._lock:
            trajectory = call.trajectory
            messages = _messages(call.request)
            trajectory.add_context(
                call.turn.request.prompt[len(trajectory.all_tokens) :],
                [without_pictures(message) for message in messages[len(trajectory.history) :]]
                if trajectory.history
                else [],
            )
            trajectory.images = call.turn.request.images
            last_seen = str(messages[-1]["content"]) if messages else trajectory.episode.question
            trajectory.add_turn(completion, choice.text, last_seen)
            if messages:  # a chat, not a completion of a text
                reply = template_message({"role": "assistant", **builder.message_fields(choice)})
                trajectory.history = [_comparable(message) for message in [*messages, reply]]
            trajectory.is_busy = False
            if trajectory in self.trajectories:
                self.trajectories.remove(trajectory)
            self.trajectories.append(trajectory)
            self.answer = choice.text
        return builder

    @property
    def keys(self) -> list[Any]:
        """The keys of all turns of the calls so far."""
        return [(self.number, number) for number in range(self.num_trajectories)]

    def completions(self) -> list[Completion]:
        """Return all trajectories; the one with the last reply comes first."""
        with self._lock:
            for trajectory in self.trajectories:
                trajectory.episode.done = True
                trajectory.episode.answer = self.answer
            return [trajectory.completion() for trajectory in reversed(self.trajectories)]

    def _find(
        self, request: GenerationRequest, pictures: tuple[Picture, ...]
    ) -> tuple[Trajectory, list[int]]:
        """Return the trajectory that a request continues, or a new one, and the prompt's tokens."""
        conditions = _conditions(request)
        history = [_comparable(message) for message in _messages(request)]
        for trajectory in reversed(self.trajectories):
            if trajectory.conditions != conditions or trajectory.is_busy:
                continue
            rest = _messages(request)[len(trajectory.history) :]
            is_same = pictures[: len(trajectory.images)] == trajectory.images
            if rest and is_same and history[: len(trajectory.history)] == trajectory.history:
                self.text.check_pictures(request, pictures)
                added = self._encode_rest(request, rest, trajectory)
                if added:
                    return trajectory, [*trajectory.all_tokens, *added]
        ids = self.text.encode(request, request.prompts[0])
        for trajectory in sorted(self.trajectories, key=lambda one: -len(one.all_tokens)):
            known = trajectory.all_tokens
            is_longer = len(ids) > len(known) and ids[: len(known)] == known
            if is_longer and pictures == trajectory.images and not trajectory.is_busy:
                return trajectory, ids
        trajectory = Trajectory(ids, number=self.num_trajectories, conditions=conditions)
        self.num_trajectories += 1
        messages = _messages(request)
        question = text_of_content(messages[-1]["content"]) if messages else request.prompts[0]
        trajectory.episode.question = str(question)
        return trajectory, ids

    def _encode_rest(
        self, request: GenerationRequest, rest: list[Message], trajectory: Trajectory
    ) -> list[int]:
        """Return the tokens of messages after a reply; [] if they cannot follow one."""
        if any(message["role"] not in ANSWERS for message in rest):
            return []
        try:
            with self.text.lock:
                if image_parts(rest):
                    self.text.chat_prompts.check_places(trajectory.all_tokens, trajectory.images)
                encoder = self.text.prompts_for(request)
                return encoder.encode_after_turn(rest, trajectory.tokens[-1])
        except TEMPLATE_ERRORS:
            return []

    def _make_builder(self, call: Call, completion: Completion) -> ResponseBuilder:
        job = Job(call.turn.request, Sampling())
        builder = make_builder(call.request, self.text, [job])
        builder.add(RowUpdate(0, 0, completion.tokens, completion.logprobs, [], completion.finish))
        return builder


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
