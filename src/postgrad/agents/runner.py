"""Runs one program per trajectory; the engine answers the calls of all of them together."""

import queue
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from postgrad.agents.endpoint import MODEL, Endpoint, WaitingCall
from postgrad.agents.program import Program
from postgrad.agents.recording import Limits, Recording
from postgrad.config.schema import AgentConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.environments.host import drain
from postgrad.errors import Missing, UnknownName, WrongValue
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Episode, Request, Sampling
from postgrad.rollout.turns import Turn
from postgrad.serving.model_text import ModelText

ROWS_PER_PROGRAM = 2  # calls of one program that decode at the same time


class Agents:
    """The agents of a run; see rollout.turns.TurnRunner.

    Args:
        config: the command, its limits, and how many programs run at the same time.
        encoder: the policy's tokenizer, how chats are rendered, and the length of prompts.
        verifier: reward.verifier; if it reads the program's reward, there must be one.

    Raises ConfigError if the command cannot be run.
    """

    def __init__(self, config: AgentConfig, encoder: Encoder, verifier: str) -> None:
        self.config = config
        self.max_prompt_tokens = encoder.max_prompt_tokens
        self.command = read_command(config.command)
        tokenizer: Any = encoder.tokenizer
        stop_ids = {*tokenizer.all_special_ids, tokenizer.eos_token_id}
        options = encoder.chat_template.options if encoder.chat_template else {}
        self.text = ModelText(MODEL, tokenizer, stop_ids, len(tokenizer), encoder.template, options)
        # The template of a model of text refuses pictures itself.
        self.text.reads_pictures = encoder.chat_template is not None
        self.needs_reward = verifier == "auto" or bool(re.search(r"\benvironment\b", verifier))

    @property
    def has_environment(self) -> bool:
        """True: a program's reward takes the place of an environment's."""
        return True

    @cached_property
    def endpoint(self) -> Endpoint:
        """What the programs call; starts when it is first needed."""
        return Endpoint()

    def close(self) -> None:
        """Stop the endpoint."""
        if "endpoint" in self.__dict__:
            self.endpoint.close()

    @contextmanager
    def open(
        self, requests: Sequence[Request], problems: Sequence[Problem], sampling: Sampling
    ) -> Iterator["Programs"]:
        """Start a program per response; kill those that are left at the end."""
        source = Programs(requests, problems, sampling, self)
        try:
            yield source
        finally:
            source.stop()


class _Play:
    """One program, its access to the policy, and how it ended."""

    def __init__(
        self,
        number: int,
        problem: Problem,
        request: Request,
        seed: int,
        sampling: Sampling,
        programs: "Programs",
    ) -> None:
        agents = programs.agents
        limits = Limits(
            sampling.max_new_tokens,
            agents.max_prompt_tokens + sampling.max_new_tokens,
            agents.config.max_calls,
        )
        self.needs_reward = agents.needs_reward
        self.prompt = request.prompt  # of the problem
        self.recording = Recording(number, agents.text, seed, limits)
        self.session = agents.endpoint.open_session(self.recording, programs.events.put)
        self.program = Program(
            agents.command, problem, self.session.variables, agents.config.timeout_s
        )
        self.result: Score | Failure | None = None  # of the program

    def run(self) -> None:
        """Run the program to its end."""
        try:
            self.result = self.program.run()
        except Exception as error:
            self.result = Failure("error", f"{type(error).__name__}: {error}"[:200])

    def completions(self) -> list[Completion]:
        """Return a program's trajectories with its reward or its failure; at least one.

        A program that gave up because a call was over its limits has not failed: its policy wrote
        too much. Its reward is 0.
        """
        completions = self.recording.completions()
        failure = self.result if isinstance(self.result, Failure) else None
        reward = self.result if isinstance(self.result, Score) else None
        if self.recording.hit_limit and completions:
            if failure is not None and failure.kind == "exit":
                failure = None
            reward = reward or Score(0.0)
        if failure is None and not completions:
            failure = Failure("no calls", "the program made no call of OPENAI_BASE_URL")
        if failure is None and reward is None and self.needs_reward:
            reason = 'its last line must be a reward, such as {"reward": 1}, or set reward.verifier'
            failure = Failure("no reward", f"the program printed no reward: {reason}")
        if not completions:
            episode = Episode(self.prompt, answer="")
            completions = [Completion(messages=[], policy_mask=[], episode=episode)]
        for completion in completions:
            episode = completion.episode
            assert episode is not None
            episode.failure = failure
            if reward is not None and failure is None:
                episode.reward = reward.value
                episode.parts = reward.parts
                episode.rewards[-1] = reward.value
        return completions


class Programs:
    """The programs of some responses, whose calls are the turns; see rollout.turns.TurnSource."""

    def __init__(
        self,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
        agents: Agents,
    ) -> None:
        self.agents = agents
        # Calls that wait for the engine, and programs that have ended.
        self.events: queue.SimpleQueue[WaitingCall | _Play] = queue.SimpleQueue()
        self.plays: list[_Play] = []
        self.group_sizes = [len(request.seeds) for request in requests]
        for request, problem in zip(requests, problems, strict=True):
            for seed in request.seeds:
                number = len(self.plays)
                self.plays.append(_Play(number, problem, request, seed, sampling, self))
        self.num_running = len(self.plays)
        self.max_rows = min(len(self.plays), agents.config.workers) * ROWS_PER_PROGRAM
        self.ready: list[Turn] = []
        self.ended: list[Any] = []
        self.waiting: dict[Any, WaitingCall] = {}  # calls, by the keys of their turns
        self.pool = ThreadPoolExecutor(agents.config.workers, thread_name_prefix="agent")
        for play in self.plays:
            self.pool.submit(self._run, play)

    def _run(self, play: _Play) -> None:
        play.run()
        self.events.put(play)

    @property
    def num_thinking(self) -> int:
        return max(0, min(self.num_running, self.agents.config.workers) - len(self.waiting))

    def collect(self, wait_s: float) -> bool:
        events = drain(self.events, wait_s)
        for event in events:
            if isinstance(event, _Play):
                self.num_running -= 1
                self.ended += event.recording.keys
            else:
                turn = event.call.turn
                self.waiting[turn.key] = event
                self.ready.append(turn)
        return bool(events)

    def on_turn(self, key: Any, completion: Completion) -> None:
        self.waiting.pop(key).answer(completion)

    def completions(self) -> list[list[Completion]]:
        """Return the trajectories of each request.

        First the one with the last reply of each program, in the order of the seeds; then the
        others, if programs made calls that do not continue each other.
        """
        plays = iter(self.plays)
        groups: list[list[Completion]] = []
        for size in self.group_sizes:
            trajectories = [next(plays).completions() for _ in range(size)]
            others = [one for some in trajectories for one in some[1:]]
            groups.append([some[0] for some in trajectories] + others)
        return groups

    def stop(self) -> None:
        """Kill what still runs, after an error or Ctrl-C; refuse further calls."""
        if self.num_running:
            for play in self.plays:
                play.program.kill()
        self.pool.shutdown(wait=True, cancel_futures=True)
        for waiting in self.waiting.values():
            waiting.refuse()
        for play in self.plays:
            self.agents.endpoint.close_session(play.session)


def read_command(text: str) -> list[str]:
    """Return the program and its arguments. Raises ConfigError if there is no such program."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise WrongValue(f"agent={text}: {error}; close the quotes") from error
    if not command:
        raise Missing("agent is empty; write for example agent='python my_agent.py'", at="agent")
    if shutil.which(command[0]) is None:
        raise UnknownName(
            f"agent={text}: there is no program {command[0]}; "
            "write for example agent='python my_agent.py'"
        )
    return command
