"""Runs one program per trajectory; the engine answers the calls of all of them together."""

import contextlib
import queue
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from postgrad.agents.endpoint import (
    MODEL,
    Endpoint,
    Session,
    WaitingCall,
    session_variables,
)
from postgrad.agents.program import Ended, Program
from postgrad.agents.recording import Limits, Recording, Trajectory
from postgrad.config.schema import AgentConfig
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Engine, Episode, Request, Sampling
from postgrad.rollout.streams import Stream, open_stream
from postgrad.serving.model_text import ModelText

WAIT_S = 1.0  # for calls, while the engine has nothing to do
ROWS_PER_PROGRAM = 2  # calls of one program that decode at the same time


@dataclass(eq=False)
class _Play:
    """One program and what becomes of it."""

    session: Session
    program: Program
    prompt: list[int]  # of the problem
    ended: Ended = field(default_factory=Ended)


class Agents:
    """The programs of a run; see rollout.turns.TurnRunner.

    Args:
        config: the command, its limits, and how many programs run at the same time.
        prompts: the policy's tokenizer, how chats are rendered, and the length of prompts.
        verifier: reward.verifier; if it reads the program's reward, there must be one.

    Raises ConfigError if the command cannot be run.
    """

    def __init__(self, config: AgentConfig, prompts: Prompts, verifier: str) -> None:
        self.config = config
        self.max_prompt_tokens = prompts.max_prompt_tokens
        self.command = read_command(config.command)
        tokenizer: Any = prompts.tokenizer
        stop_ids = {*tokenizer.all_special_ids, tokenizer.eos_token_id}
        options = prompts.chat_template.options if prompts.chat_template else {}
        self.text = ModelText(MODEL, tokenizer, stop_ids, len(tokenizer), prompts.template, options)
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

    def run(
        self,
        engine: Engine,
        requests: Sequence[Request],
        problems: Sequence[Problem],
        sampling: Sampling,
    ) -> list[list[Completion]]:
        """Return the trajectories of each request.

        First the one with the last reply of each program, in the order of the seeds; then the
        others, if programs made calls that do not continue each other.
        """
        calls: queue.SimpleQueue[WaitingCall | None] = queue.SimpleQueue()
        groups: list[list[_Play]] = []
        for request, problem in zip(requests, problems, strict=True):
            plays = [
                self._prepare(problem, request, seed, sampling, calls) for seed in request.seeds
            ]
            groups.append(plays)
        plays = [play for group in groups for play in group]
        try:
            _Loop(engine, sampling, plays, calls, self.config.workers).run()
        finally:
            for play in plays:
                self.endpoint.close_session(play.session)
        return [self._collect(group) for group in groups]

    def _prepare(
        self, problem: Problem, request: Request, seed: int, sampling: Sampling, calls: Any
    ) -> _Play:
        limits = Limits(
            sampling.max_new_tokens,
            self.max_prompt_tokens + sampling.max_new_tokens,
            self.config.max_calls,
        )
        session = self.endpoint.open_session(Recording(self.text, seed, limits), calls)
        variables = session_variables(session)
        program = Program(self.command, problem, variables, self.config.timeout_s)
        return _Play(session, program, request.prompt)

    def _collect(self, plays: list[_Play]) -> list[Completion]:
        main: list[Completion] = []
        others: list[Completion] = []
        for play in plays:
            first, *rest = self._trajectories(play)
            main.append(first)
            others += rest
        return main + others

    def _trajectories(self, play: _Play) -> list[Completion]:
        """Return a program's trajectories with its reward or its failure; at least one.

        A program that gave up because a call was over its limits has not failed: its policy wrote
        too much. Its reward is 0.
        """
        completions = play.session.recording.completions()
        failure = play.ended.failure
        reward = play.ended.reward
        if play.session.recording.hit_limit and completions:
            if failure is not None and failure.kind == "exit":
                failure = None
            reward = reward or Score(0.0)
        if failure is None and not completions:
            failure = Failure("no calls", "the program made no call of OPENAI_BASE_URL")
        if failure is None and reward is None and self.needs_reward:
            reason = 'its last line must be a reward, such as {"reward": 1}, or set reward.verifier'
            failure = Failure("no reward", f"the program printed no reward: {reason}")
        if not completions:
            episode = Episode(play.prompt, answer="")
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


class _Loop:
    """Lets programs run and answers their calls until all programs have ended."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        plays: Sequence[_Play],
        calls: "queue.SimpleQueue[WaitingCall | None]",
        workers: int,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.plays = plays
        self.calls = calls
        self.workers = workers
        self.num_left = len(plays)
        self.streams: dict[tuple[str, ...], Stream] = {}  # by stop strings
        self.waiting: dict[Trajectory, WaitingCall] = {}  # calls that the engine has

    def run(self) -> None:
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="agent")
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop, pool)
            for play in self.plays:
                pool.submit(self._play, play)
            while self.num_left:
                self._take_calls(stack)
                for stream in self.streams.values():
                    if stream.busy:
                        for trajectory, completion in stream.poll():
                            self.waiting.pop(trajectory).answer(completion)

    def _play(self, play: _Play) -> None:
        """Run a program; None in the queue of calls means that it has ended."""
        try:
            play.ended = play.program.run()
        except Exception as error:
            play.ended = Ended(failure=Failure("error", f"{type(error).__name__}: {error}"[:200]))
        finally:
            self.calls.put(None)

    def _take_calls(self, stack: contextlib.ExitStack) -> None:
        """Give the engine the calls that are there.

        Waits for the first one if the engine has nothing to do, and a little for further ones if
        it generates in waves, until every running program waits for it.
        """
        began = time.monotonic()
        while self.num_left:
            busy = [stream.patience_s for stream in self.streams.values() if stream.busy]
            wait_s = WAIT_S
            if busy:
                num_running = min(self.num_left, self.workers)
                all_wait = len(self.waiting) >= num_running
                wait_s = 0.0 if all_wait else max(busy) - (time.monotonic() - began)
            try:
                call = self.calls.get(timeout=wait_s) if wait_s > 0 else self.calls.get_nowait()
            except queue.Empty:
                if busy:
                    return
                continue
            if call is None:
                self.num_left -= 1
            else:
                self._add(call, stack)

    def _add(self, waiting: WaitingCall, stack: contextlib.ExitStack) -> None:
        call = waiting.call
        stops = (*self.sampling.stop, *call.request.stop)
        if stops not in self.streams:
            sampling = replace(self.sampling, stop=stops)
            num_rows = min(len(self.plays), self.workers) * ROWS_PER_PROGRAM
            self.streams[stops] = stack.enter_context(open_stream(self.engine, sampling, num_rows))
        self.waiting[call.trajectory] = waiting
        self.streams[stops].add(call.engine_request, [call.trajectory])

    def _stop(self, pool: ThreadPoolExecutor) -> None:
        """Kill what still runs, after an error or Ctrl-C."""
        if self.num_left:
            for play in self.plays:
                play.program.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        for waiting in self.waiting.values():
            waiting.refuse()


def read_command(text: str) -> list[str]:
    """Return the program and its arguments. Raises ConfigError if there is no such program."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"agent={text}: {error}; close the quotes") from error
    if not command:
        raise ConfigError("agent is empty; write for example agent='python my_agent.py'")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"agent={text}: there is no program {command[0]}; "
            "write for example agent='python my_agent.py'"
        )
    return command


def open_agents(config: AgentConfig, prompts: Prompts, verifier: str) -> Agents | None:
    """Return the agents of the settings; None if there are none."""
    return Agents(config, prompts, verifier) if config.command else None
