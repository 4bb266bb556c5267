"""Responses to which environments and tools answer, turn by turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from postgrad.environments.calls import THOUGHT_END, Call, CallParser
from postgrad.environments.port import Observation, Outcome, add_parts
from postgrad.errors import ConfigError, first_line
from postgrad.pictures import (
    Picture,
    PictureError,
    add_content,
    picture_of_data_url,
    text_of_content,
    with_pictures,
)
from postgrad.problem import Failure, Message, Problem
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit, trajectory_seed
from postgrad.rollout.transcript import Transcript
from postgrad.rollout.turns import Turn

if TYPE_CHECKING:  # environments and tools are imported by a run that has them
    from postgrad.environments.host import Host, Result, Sessions
    from postgrad.environments.lookup import Environments


class TurnPrompts(Protocol):
    """Text of turns to token ids and back."""

    max_prompt_tokens: int
    tokenizer: Any

    @property
    def image_token_id(self) -> int: ...

    def prompt(self, problem: Problem) -> list[int]: ...

    def check_places(self, ids: Sequence[int], pictures: Sequence[Picture]) -> None: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_turn(self, ids: Sequence[int]) -> str: ...

    def encode_after_turn(self, messages: Sequence[Message], end: int) -> list[int]: ...


class Turns:
    """The environments and tools of a run, and the largest number of turns per response."""

    def __init__(self, environments: "Environments", encoder: TurnPrompts, max_turns: int) -> None:
        self.environments = environments
        self.encoder = encoder
        self.max_turns = max_turns

    @cached_property
    def host(self) -> "Host":
        """What runs the sessions; starts when it is first needed."""
        return self.environments.new_host()

    @cached_property
    def reads_pictures(self) -> bool:
        """Whether the model is shown the pictures that tools answer with."""
        try:
            return self.encoder.image_token_id >= 0
        except ConfigError:
            return False

    def close(self) -> None:
        """End the processes and threads of environments and tools."""
        if "host" in self.__dict__:
            self.host.close()
        self.environments.close()

    @contextmanager
    def open(
        self, requests: Sequence[Request], problems: Sequence[Problem], sampling: Sampling
    ) -> Iterator["Conversations"]:
        """Open a session per response; close those that are left at the end."""
        source = Conversations(requests, problems, sampling, self)
        try:
            source.open_all()
            yield source
        finally:
            source.close_all()

    @cached_property
    def call_parser(self) -> CallParser:
        """What finds tool calls in the format of the model."""
        return self.environments.call_parser(self.encoder.tokenizer)

    def find_calls(self, tokens: list[int]) -> list[Call]:
        """Return the tool calls of a turn, without those in its thought."""
        if not self.environments.schemas:
            return []
        return self.call_parser.parse(self.encoder.decode_turn(tokens))

    def find_action(self, tokens: list[int]) -> str:
        """Return the text of a turn for an environment, without its thought."""
        return self.encoder.decode(tokens).rpartition(THOUGHT_END)[2].strip()


@dataclass(eq=False)
class _Conversation:
    """One response that is being sampled, turn by turn."""

    key: int
    seed: int
    limit: int  # tokens of the response
    problem: Problem
    transcript: Transcript
    last_seen: str = ""  # the text before the next turn

    def next_turn(self) -> Turn:
        number = self.transcript.num_turns
        seed = trajectory_seed(self.seed, number, "turn", 0) if number else self.seed
        left = self.limit - len(self.transcript.tokens)
        request = Request(self.transcript.all_tokens, [seed], left, self.transcript.images)
        return Turn(self.key, request, continues=number > 0)


class Conversations:
    """Responses to which environments and tools answer; see TurnSource."""

    def __init__(
        self,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
        turns: Turns,
    ) -> None:
        self.turns = turns
        self.has_environment = turns.environments.has_environment
        self.sessions: Sessions = turns.host.new_sessions()
        self.conversations: list[_Conversation] = []
        self.group_sizes = [len(request.seeds) for request in requests]
        for request, problem in zip(requests, problems, strict=True):
            limit = token_limit(request, sampling)
            for seed in request.seeds:
                key = len(self.conversations)
                transcript = Transcript(request.prompt, images=request.images)
                self.conversations.append(_Conversation(key, seed, limit, problem, transcript))
        self.max_rows = self.num_running = len(self.conversations)
        self.num_thinking = 0  # conversations that wait for their environment
        self.ready: list[Turn] = []
        self.ended: list[Any] = []

    def open_all(self) -> None:
        for conversation in self.conversations:
            problem = conversation.problem
            spec = self.turns.environments.spec_for(problem)
            self.sessions.open(conversation.key, spec, problem, conversation.seed)
            self.num_thinking += 1

    def close_all(self) -> None:
        for conversation in self.conversations:
            self.sessions.close(conversation.key)

    def completions(self) -> list[list[Completion]]:
        rows = iter(self.conversations)
        return [
            [next(rows).transcript.completion(self.has_environment) for _ in range(size)]
            for size in self.group_sizes
        ]

    def collect(self, wait_s: float) -> bool:
        replies = self.sessions.collect(wait_s)
        for key, result in replies:
            self.num_thinking -= 1
            self.on_reply(self.conversations[key], result)
        return bool(replies)

    def on_turn(self, key: int, completion: Completion) -> None:
        """Give a turn of the policy to its environment or tools.

        A turn that was cut at the length is no action and makes no calls. Calls of the last turn
        are not answered, because the policy could not read the answers.
        """
        conversation = self.conversations[key]
        text = self.turns.encoder.decode(completion.tokens)
        conversation.transcript.add_turn(completion, text, conversation.last_seen)
        is_complete = completion.finish == "stop"
        calls = self.turns.find_calls(completion.tokens) if is_complete else []
        is_action = self.has_environment and is_complete and not calls
        if is_action or (calls and not self.is_last_turn(conversation)):
            self.num_thinking += 1
            self.sessions.act(key, self.turns.find_action(completion.tokens), calls)
        else:
            self.end(conversation)

    def is_last_turn(self, conversation: _Conversation) -> bool:
        return conversation.transcript.num_turns >= self.turns.max_turns

    def on_reply(self, conversation: _Conversation, result: "Result") -> None:
        """Take the result of an operation of the conversation's session."""
        if isinstance(result, Observation):
            try:
                images = tuple(map(picture_of_data_url, result.images))
                if conversation.transcript.num_turns:
                    self.on_observation(conversation, result, images)
                else:
                    self.start(conversation, result.messages, images)
            except (ConfigError, PictureError) as error:
                if not (result.images or conversation.transcript.images):
                    raise
                self.fail(conversation, Failure("picture", first_line(error)))
        elif isinstance(result, Outcome):
            episode = conversation.transcript.episode
            episode.reward = sum(episode.rewards) + result.reward
            episode.parts = add_parts(episode.parts, result.parts)
            episode.state = result.state
            self.close(conversation)
        else:
            self.fail(conversation, result)

    def start(
        self, conversation: _Conversation, messages: Sequence[Message], images: tuple[Picture, ...]
    ) -> None:
        """Add what reset() shows to the prompt, and let the policy begin."""
        conversation.last_seen = _seen(messages, images)
        conversation.transcript.images += images
        if self.has_environment:
            shown = messages[0]["content"] if messages else ""
            problem = _with_shown(conversation.problem, shown, images)
            prompt = self.turns.encoder.prompt(problem)
            conversation.transcript.prompt = prompt
            conversation.transcript.episode.question = text_of_content(
                problem.messages[-1]["content"]
            )
            limit = self.turns.encoder.max_prompt_tokens
            reason = ""
            if not prompt:
                reason = "the prompt has no tokens: neither the problem nor reset gives a text"
            elif len(prompt) > limit:
                reason = (
                    f"the prompt with the text of reset has {len(prompt)} tokens, "
                    f"data.max_prompt_tokens={limit}"
                )
            if reason:
                self.fail(conversation, Failure("prompt", reason))
                return
        self.ready.append(conversation.next_turn())

    def on_observation(
        self,
        conversation: _Conversation,
        observation: Observation,
        images: tuple[Picture, ...],
    ) -> None:
        """Take the reward of a turn; let the policy go on with what follows it.

        If that leaves no tokens for another turn, the response ends with the policy's turn and
        counts as cut at the length.
        """
        transcript = conversation.transcript
        episode = transcript.episode
        transcript.num_calls += observation.calls
        transcript.num_errors += observation.errors
        episode.rewards[-1] += observation.reward
        episode.parts = add_parts(episode.parts, observation.parts)
        episode.done = observation.done
        if observation.done or self.is_last_turn(conversation):
            self.end(conversation)
            return
        messages = observation.messages
        if images and messages[0]["role"] == "tool" and not self.turns.reads_pictures:
            messages = [{**one, "content": text_of_content(one["content"])} for one in messages]
            images = ()
        tokens = self.turns.encoder.encode_after_turn(
            with_pictures(messages, images), transcript.tokens[-1]
        )
        if images:
            self.turns.encoder.check_places(transcript.all_tokens, transcript.images)
        if len(transcript.tokens) + len(tokens) >= conversation.limit:
            transcript.finish = "length"
            self.end(conversation)
            return
        conversation.last_seen = _seen(messages, images)
        transcript.add_context(tokens, messages)
        transcript.images += images
        self.ready.append(conversation.next_turn())

    def end(self, conversation: _Conversation) -> None:
        """Ask for the score, which ends the conversation."""
        self.num_thinking += 1
        self.sessions.finish(conversation.key)

    def fail(self, conversation: _Conversation, failure: Failure) -> None:
        conversation.transcript.episode.failure = failure
        self.close(conversation)

    def close(self, conversation: _Conversation) -> None:
        """End a conversation. A server may wait for a free session."""
        self.num_running -= 1
        self.ended.append(conversation.key)
        self.sessions.close(conversation.key)


def _seen(messages: Sequence[Message], images: Sequence[Picture]) -> str:
    """Return a text that names what the policy sees; equal for equal texts and pictures."""
    texts = [str(message["content"]) for message in messages]
    return "\n".join([*texts, *(picture.key for picture in images)])


def _with_shown(problem: Problem, shown: Any, images: Sequence[Picture]) -> Problem:
    """Return the problem with a text or parts at the end of its last user message."""
    if not shown:
        return problem
    *earlier, last = problem.messages
    if last["role"] != "user":
        earlier, last = problem.messages, {"role": "user", "content": ""}
    return replace(
        problem,
        messages=(*earlier, {**last, "content": add_content(last["content"], shown)}),
        images=(*problem.prompt_images, *images),
    )
