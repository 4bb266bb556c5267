"""Responses of several turns: the policy acts, what it acts upon answers, it continues.

`run_turns` is the one loop over turns. What answers is a TurnSource: the conversations with
environments and tools (conversations.py), or the programs of agents (agents/runner.py). Each turn
has its own seed. The seed of the first turn is the response's seed, so tools do not change a
response without calls.

No response waits for another: each continues when its answer has come, while the engine decodes
the others.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from postgrad import phases
from postgrad.problem import Problem
from postgrad.rollout.engine import Completion, Engine, Request, Sampling
from postgrad.rollout.streams import Stream, open_stream

WAIT_S = 1.0  # for answers, while the engine has nothing to do


@dataclass(frozen=True)
class Turn:
    """A turn that the policy writes next.

    Attributes:
        key: names the response; turns are given to the engine in the order of their keys.
        request: the prompt with all earlier turns, and one seed.
        stop: stop strings besides those of the run.
        continues: the response has earlier turns.
    """

    key: Any
    request: Request
    stop: tuple[str, ...] = ()
    continues: bool = False


class TurnSource(Protocol):
    """What answers between the turns of some responses.

    Attributes:
        max_rows: turns that the engine may have at the same time.
        num_running: responses that have not ended.
        num_thinking: those whose next turn or end is not known yet.
        ready: turns for the engine, which takes them out.
        ended: keys that will not continue; the engine takes them out.
    """

    max_rows: int
    num_running: int
    ready: list[Turn]
    ended: list[Any]

    @property
    def num_thinking(self) -> int: ...

    def collect(self, wait_s: float) -> bool:
        """Take the answers that are there; wait for the first one. Return whether any came."""
        ...

    def on_turn(self, key: Any, completion: Completion) -> None:
        """Take a turn that the engine has sampled."""
        ...

    def completions(self) -> list[list[Completion]]:
        """Return the ended responses of each request.

        A request may have more completions than seeds; the first ones belong to its seeds.
        """
        ...


class TurnRunner(Protocol):
    """What answers in a run: its environments and tools, or its agents."""

    def open(
        self, requests: Sequence[Request], problems: Sequence[Problem], sampling: Sampling
    ) -> AbstractContextManager[TurnSource]:
        """Begin the responses of some requests; the context ends what still runs."""
        ...

    def close(self) -> None: ...


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
    with (
        turns.open(requests, problems, sampling) as source,
        _Streams(engine, sampling, source.max_rows) as streams,
    ):
        total = source.num_running
        while source.num_running:
            _collect(source, streams)
            streams.add(source.ready)
            source.ready.clear()
            streams.forget(source.ended)
            source.ended.clear()
            for key, completion in streams.poll():
                source.on_turn(key, completion)
            phases.count(total - source.num_running, total)
        return source.completions()


def _collect(source: TurnSource, streams: "_Streams") -> None:
    """Let the source take answers.

    Waits for the first one if the engine has nothing to do, and a little for further ones if
    the engine generates in waves.
    """
    began = time.monotonic()
    while True:
        wait_s = WAIT_S
        if streams.busy or not source.num_thinking:
            wait_s = 0.0
        elif source.ready:
            batch_wait_s = max(streams.stream(turn.stop).batch_wait_s for turn in source.ready)
            wait_s = max(0.0, began + batch_wait_s - time.monotonic())
        if not source.collect(wait_s) or not wait_s:
            return


class _Streams(contextlib.ExitStack):
    """The streams of an engine, one per set of stop strings."""

    def __init__(self, engine: Engine, sampling: Sampling, max_rows: int) -> None:
        super().__init__()
        self.engine = engine
        self.sampling = sampling
        self.max_rows = max_rows
        self.by_stop: dict[tuple[str, ...], Stream] = {}

    @property
    def busy(self) -> bool:
        return any(stream.busy for stream in self.by_stop.values())

    def stream(self, stop: tuple[str, ...]) -> Stream:
        """Return the stream with these stop strings besides those of the run."""
        if stop not in self.by_stop:
            sampling = replace(self.sampling, stop=(*self.sampling.stop, *stop))
            opened = open_stream(self.engine, sampling, self.max_rows)
            self.by_stop[stop] = self.enter_context(opened)
        return self.by_stop[stop]

    def add(self, turns: Sequence[Turn]) -> None:
        """Give turns to the engine; first turns with equal prompts become one request."""
        groups: dict[Any, list[Turn]] = {}
        for turn in sorted(turns, key=lambda turn: turn.key):
            request = turn.request
            first = (turn.stop, request.max_new_tokens, tuple(request.prompt), request.images)
            groups.setdefault(turn.key if turn.continues else first, []).append(turn)
        for group in groups.values():
            seeds = [turn.request.seeds[0] for turn in group]
            request = replace(group[0].request, seeds=seeds)
            self.stream(group[0].stop).add(request, [turn.key for turn in group])

    def forget(self, keys: Sequence[Any]) -> None:
        """Free what is kept of rows that will not continue."""
        for stream in self.by_stop.values():
            for key in keys:
                stream.forget(key)

    def poll(self) -> Iterator[tuple[Any, Completion]]:
        """Decode for a while; yield the turns that have ended."""
        for stream in self.by_stop.values():
            if stream.busy:
                yield from stream.poll()
