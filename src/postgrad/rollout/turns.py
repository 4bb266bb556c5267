"""Responses of several turns: the policy acts, an environment or tools answer, it continues.

What answers, and what the chat template writes between two turns, is part of the response but not
of the policy: it has no log-probs, no loss, and verifiers do not see it. Each turn has its own
seed. The seed of the first turn is the response's seed, so tools do not change a response without
calls.

No trajectory waits for another: each continues when its environment has answered, while the engine
decodes the others.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from postgrad import phases
from postgrad.environments.calls import THOUGHT_END, Call, CallParser
from postgrad.environments.port import Observation, Outcome, add_parts
from postgrad.problem import Failure, Message, Problem
from postgrad.rollout.engine import (
    Completion,
    Engine,
    Episode,
    Request,
    Sampling,
    token_limit,
    trajectory_seed,
)
from postgrad.rollout.streams import Stream, open_stream

if TYPE_CHECKING:  # environments and tools are imported by a run that has them
    from postgrad.environments.host import Host, Result, Sessions
    from postgrad.environments.lookup import Environments

WAIT_S = 1.0  # for environments, while the engine has nothing to do


class TurnPrompts(Protocol):
    """Text of turns to token ids and back."""

    max_prompt_tokens: int
    tokenizer: Any

    def encode(self, problem: Problem) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_turn(self, ids: Sequence[int]) -> str: ...

    def encode_after_turn(self, messages: Sequence[Message], end: int) -> list[int]: ...


class TurnRunner(Protocol):
    """What samples responses of several turns: Turns, or the agents of a run.

    A request may have more completions than seeds; the first ones belong to its seeds.
    """

    def run(
        self,
        engine: Engine,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
    ) -> list[list[Completion]]: ...

    def close(self) -> None: ...


class Turns:
    """The environments and tools of a run, and the largest number of turns per response."""

    def __init__(self, environments: "Environments", prompts: TurnPrompts, max_turns: int) -> None:
        self.environments = environments
        self.prompts = prompts
        self.max_turns = max_turns

    @cached_property
    def host(self) -> "Host":
        """What runs the sessions; starts when it is first needed."""
        return self.environments.new_host()

    def close(self) -> None:
        """End the processes and threads of environments and tools."""
        if "host" in self.__dict__:
            self.host.close()
        self.environments.close()

    def run(
        self,
        engine: Engine,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
    ) -> list[list[Completion]]:
        """Return the completions of each request; an environment or tools answer."""
        return _Runner(engine, requests, problems, sampling, self).run()

    @cached_property
    def call_parser(self) -> CallParser:
        """What finds tool calls in the format of the model."""
        return self.environments.call_parser(self.prompts.tokenizer)

    def find_calls(self, tokens: list[int]) -> list[Call]:
        """Return the tool calls of a turn, without those in its thought."""
        if not self.environments.schemas:
            return []
        return self.call_parser.parse(self.prompts.decode_turn(tokens))

    def find_action(self, tokens: list[int]) -> str:
        """Return the text of a turn for an environment, without its thought."""
        return self.prompts.decode(tokens).rpartition(THOUGHT_END)[2].strip()


def make_turns(
    environments: "Environments | None", prompts: TurnPrompts, max_turns: int
) -> Turns | None:
    """Return the turns of a run; None if it has neither an environment nor tools."""
    return Turns(environments, prompts, max_turns) if environments else None


@dataclass
class _Conversation:
    """One response that is being sampled, turn by turn."""

    key: int
    prompt: list[int]
    seed: int
    limit: int  # tokens of the response
    problem: Problem
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    has_logprobs: bool = True  # False: the engine gives none
    finish: str = "stop"
    num_turns: int = 0
    num_calls: int = 0
    num_errors: int = 0
    episode: Episode = field(default_factory=Episode)
    messages: list[Message] = field(default_factory=list)
    last_seen: str = ""  # the text before the next turn
    ended: bool = False

    def add_policy_turn(self, completion: Completion, text: str) -> None:
        """Append the policy's turn; `text` is its decoded text."""
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.has_logprobs &= len(completion.logprobs) == len(completion.tokens)
        self.policy_mask += [True] * len(completion.tokens)
        self.kept_ids += completion.kept_ids or [[]] * len(completion.tokens)
        self.finish = completion.finish
        self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1
        self.episode.turn_ends.append(len(self.tokens))
        self.episode.rewards.append(0.0)
        name = hashlib.blake2b(self.last_seen.encode(), digest_size=8).hexdigest()
        self.episode.states.append(name)

    def add_reward(self, observation: Observation) -> None:
        self.num_calls += observation.calls
        self.num_errors += observation.errors
        self.episode.rewards[-1] += observation.reward
        self.episode.parts = add_parts(self.episode.parts, observation.parts)
        self.episode.done = observation.done

    def add_messages(self, messages: Sequence[Message], prompts: TurnPrompts) -> bool:
        """Append what follows a turn.

        Returns False when it leaves no tokens for another turn: the response then ends with the
        policy's turn and counts as cut at the length.
        """
        new_tokens = prompts.encode_after_turn(messages, self.tokens[-1])
        if len(self.tokens) + len(new_tokens) >= self.limit:
            self.finish = "length"
            return False
        self.last_seen = "\n".join(str(message["content"]) for message in messages)
        self.messages += messages
        self.tokens += new_tokens
        self.logprobs += [0.0] * len(new_tokens)
        self.policy_mask += [False] * len(new_tokens)
        self.kept_ids += [[]] * len(new_tokens)
        return True

    def next_request(self) -> Request:
        """Return the request of a turn after the first."""
        seed = trajectory_seed(self.seed, self.num_turns, "turn", 0)
        return Request([*self.prompt, *self.tokens], [seed], self.limit - len(self.tokens))

    def completion(self, with_episode: bool) -> Completion:
        episode = self.episode
        episode.prompt = self.prompt
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs if self.has_logprobs else [],
            finish=self.finish,
            policy_mask=self.policy_mask,
            turns=self.num_turns,
            calls=self.num_calls,
            errors=self.num_errors,
            messages=self.messages,
            episode=episode if with_episode else None,
            kept_ids=self.kept_ids if any(self.kept_ids) else None,
        )


def run_turns(
    engine: Engine,
    requests: Sequence[Request],
    problems: Sequence[Problem],
    sampling: Sampling,
    turns: TurnRunner | None,
) -> list[list[Completion]]:
    """Return the completions of each request, of several turns if there is `turns`."""
    if turns is None:
        return engine.generate(requests, sampling)
    return turns.run(engine, requests, problems, sampling)


class _Runner:
    """Takes all conversations of one call to their ends."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
        turns: Turns,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.turns = turns
        self.has_environment = turns.environments.has_environment
        self.sessions: Sessions = turns.host.new_sessions()
        self.conversations: list[_Conversation] = []
        self.groups: list[list[_Conversation]] = []
        for request, problem in zip(requests, problems, strict=True):
            limit = token_limit(request, sampling)
            group: list[_Conversation] = []
            for seed in request.seeds:
                key = len(self.conversations) + len(group)
                group.append(_Conversation(key, request.prompt, seed, limit, problem))
            self.groups.append(group)
            self.conversations += group
        self.num_running = len(self.conversations)
        self.num_waiting = 0  # conversations that wait for their environment
        self.ready: list[_Conversation] = []  # conversations that wait for the engine

    def run(self) -> list[list[Completion]]:
        try:
            with open_stream(self.engine, self.sampling, len(self.conversations)) as stream:
                self.open_all()
                while self.num_running:
                    self.collect(stream)
                    self.submit(stream)
                    if stream.busy:
                        for key, completion in stream.poll():
                            self.on_turn(self.conversations[key], completion)
                    total = len(self.conversations)
                    phases.count(total - self.num_running, total)
        finally:
            for conversation in self.conversations:
                self.sessions.close(conversation.key)
        return [
            [conversation.completion(self.has_environment) for conversation in group]
            for group in self.groups
        ]

    def open_all(self) -> None:
        for conversation in self.conversations:
            problem = conversation.problem
            spec = self.turns.environments.spec_for(problem)
            self.sessions.open(conversation.key, spec, problem, conversation.seed)
            self.num_waiting += 1

    def collect(self, stream: Stream) -> None:
        """Take the answers of environments.

        Waits for the first one if the engine has nothing to do, and a little for further ones if
        the engine generates in waves.
        """
        began = time.monotonic()
        while self.num_waiting:
            if stream.busy:
                wait_s = 0.0
            elif self.ready:
                wait_s = max(0.0, began + stream.patience_s - time.monotonic())
            else:
                wait_s = WAIT_S
            replies = self.sessions.collect(wait_s)
            for key, result in replies:
                self.num_waiting -= 1
                self.on_reply(self.conversations[key], result, stream)
            if not replies or not wait_s:
                return

    def submit(self, stream: Stream) -> None:
        """Give the engine all conversations that are ready; equal prompts become one request."""
        by_prompt: dict[tuple[int, tuple[int, ...]], list[_Conversation]] = {}
        for conversation in sorted(self.ready, key=lambda conversation: conversation.key):
            if conversation.num_turns:
                stream.add(conversation.next_request(), [conversation.key])
            else:
                prompt = (conversation.limit, tuple(conversation.prompt))
                by_prompt.setdefault(prompt, []).append(conversation)
        self.ready = []
        for group in by_prompt.values():
            request = Request(group[0].prompt, [c.seed for c in group], group[0].limit)
            stream.add(request, [c.key for c in group])

    def on_turn(self, conversation: _Conversation, completion: Completion) -> None:
        """Give a turn of the policy to its environment or tools.

        A turn that was cut at the length is no action and makes no calls. Calls of the last turn
        are not answered, because the policy could not read the answers.
        """
        conversation.add_policy_turn(completion, self.turns.prompts.decode(completion.tokens))
        is_last = conversation.num_turns >= self.turns.max_turns
        is_complete = completion.finish == "stop"
        calls = self.turns.find_calls(completion.tokens) if is_complete else []
        if (calls and not is_last) or (self.has_environment and is_complete and not calls):
            action = self.turns.find_action(completion.tokens)
            self.sessions.act(conversation.key, action, calls)
            self.num_waiting += 1
        else:
            self.end(conversation)

    def on_reply(self, conversation: _Conversation, result: "Result", stream: Stream) -> None:
        """Take the result of an operation of the conversation's session."""
        episode = conversation.episode
        if isinstance(result, str):
            self.start(conversation, result)
        elif isinstance(result, Observation):
            self.on_observation(conversation, result)
        elif isinstance(result, Outcome):
            episode.reward = sum(episode.rewards) + result.reward
            episode.parts = add_parts(episode.parts, result.parts)
            episode.state = result.state
            conversation.ended = True
        else:
            episode.failure = result
        if episode.failure is not None:
            conversation.ended = True
        if conversation.ended:
            self.num_running -= 1
            stream.forget(conversation.key)
            self.sessions.close(conversation.key)  # a server may wait for a free session

    def start(self, conversation: _Conversation, text: str) -> None:
        """Add the text of reset() to the prompt, and let the policy begin."""
        conversation.last_seen = text
        if self.has_environment:
            problem = _with_text(conversation.problem, text)
            conversation.episode.question = str(problem.messages[-1]["content"])
            conversation.prompt = self.turns.prompts.encode(problem)
            if not conversation.prompt:
                reason = "the prompt has no tokens: neither the problem nor reset gives a text"
                conversation.episode.failure = Failure("prompt", reason)
                return
            limit = self.turns.prompts.max_prompt_tokens
            if len(conversation.prompt) > limit:
                reason = (
                    f"the prompt with the text of reset has {len(conversation.prompt)} tokens, "
                    f"data.max_prompt_tokens={limit}"
                )
                conversation.episode.failure = Failure("prompt", reason)
                return
        self.ready.append(conversation)

    def on_observation(self, conversation: _Conversation, observation: Observation) -> None:
        conversation.add_reward(observation)
        is_last = conversation.num_turns >= self.turns.max_turns
        if observation.done or is_last:
            self.end(conversation)
        elif conversation.add_messages(observation.messages, self.turns.prompts):
            self.ready.append(conversation)
        else:
            self.end(conversation)

    def end(self, conversation: _Conversation) -> None:
        """Ask for the score, which ends the conversation."""
        self.sessions.finish(conversation.key)
        self.num_waiting += 1


def _with_text(problem: Problem, text: str) -> Problem:
    """Return the problem with the text at the end of its last user message."""
    if not text:
        return problem
    *earlier, last = problem.messages
    if last["role"] != "user":
        return replace(problem, messages=(*problem.messages, {"role": "user", "content": text}))
    content = f"{last['content']}\n\n{text}" if last["content"] else text
    return replace(problem, messages=(*earlier, {**last, "content": content}))
