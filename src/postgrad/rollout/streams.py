"""Streams: requests join and leave a running generation, each when it is ready.

An engine with `open_stream` decodes all rows of a stream together, and rows join while others
decode. Other engines generate in waves: all requests that wait become one call of generate.
"""

import time
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from postgrad.rollout.engine import Completion, Engine, Request, Sampling

Finished = tuple[Any, Completion]  # the key of a row and its completion

FIRST_WAIT_S = 1.0  # that the first wave waits for further requests
WAVE_WAIT = 0.5  # later waves wait at most this share of the time of the wave before


class Stream(Protocol):
    """A running generation. Use it as a context manager."""

    # How long the caller may wait for further requests before it calls poll.
    batch_wait_s: float

    def __enter__(self) -> "Stream": ...

    def __exit__(self, *_: object) -> None: ...

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        """Add a request; `keys` has one name per seed.

        A later request of the same key whose prompt continues the row reuses its keys and values,
        if the engine kept them.
        """
        ...

    def poll(self) -> list[Finished]:
        """Generate for a while; returns the rows that have ended."""
        ...

    def forget(self, key: Hashable) -> None:
        """Free what is kept for a row that will not continue."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there are rows that have not ended."""
        ...


@runtime_checkable
class UpdatableStream(Stream, Protocol):
    """A stream whose engine may get new weights between two polls; its rows go on with them.

    Its completions have the version of the weights of each token.
    """

    def refresh_weights(self) -> int:
        """Use the engine's new weights from the next token on.

        The keys and values of earlier tokens stay as they are. Returns the version by which
        `Completion.versions` of this stream name these weights; it is not returned again.
        """
        ...

    def cancel(self, keys: Collection[Hashable]) -> None:
        """Remove requests with any of these keys, with all their rows."""
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that decodes the rows of a stream together."""

    def open_stream(self, sampling: Sampling, num_rows: int) -> Stream: ...


def open_stream(engine: Engine, sampling: Sampling, num_rows: int) -> Stream:
    """Return a stream of an engine for at most `num_rows` rows at a time."""
    if isinstance(engine, StreamingEngine):
        return engine.open_stream(sampling, num_rows)
    return BatchedStream(engine, sampling)


class BatchedStream:
    """A stream over `generate`: each poll samples all requests that wait."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self.engine = engine
        self.sampling = sampling
        self.waiting: list[tuple[Request, list[Hashable]]] = []
        self.batch_wait_s = FIRST_WAIT_S

    def __enter__(self) -> "BatchedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        self.waiting.append((request, list(keys)))

    def poll(self) -> list[Finished]:
        wave = self.waiting
        self.waiting = []
        if not wave:
            return []
        began = time.perf_counter()
        groups = self.engine.generate([request for request, _ in wave], self.sampling)
        self.batch_wait_s = WAVE_WAIT * (time.perf_counter() - began)
        finished: list[Finished] = []
        for (_, keys), completions in zip(wave, groups, strict=True):
            finished += zip(keys, completions, strict=True)
        return finished

    def forget(self, key: Hashable) -> None:
        """Do nothing: nothing is kept."""
