"""One thread runs all work on the model, in the order of the requests.

Samples that wait for the same weights with the same sampling parameters are decoded together.
"""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.errors import ConfigError, RunError
from postgrad.model.threads import set_threads
from postgrad.rollout.engine import Sampling
from postgrad.serving.memory import memory_errors_as
from postgrad.serving.tinker.trained_model import (
    SampleRequest,
    SampleResult,
    SamplerWeights,
    TrainedModel,
)
from postgrad.web import HttpError

USER_ERRORS = (ConfigError, RunError, HttpError)

# on_done(result, error): one of both is None.
OnDone = Callable[[Any, BaseException | None], None]


@dataclass(eq=False)
class Call:
    """A function of the model."""

    request_id: str
    function: Callable[[], Any]
    on_done: OnDone


@dataclass(eq=False)
class SampleCall:
    """A sample request; calls with the same `weights` and `sampling` may run together."""

    request_id: str
    weights: Callable[[], SamplerWeights | None]
    sampling: Sampling
    request: SampleRequest
    on_done: OnDone
    sampler_id: str = ""


class Worker:
    """Runs calls in its own thread until end()."""

    def __init__(self, model: TrainedModel, threads: int = 0) -> None:
        self.model = model
        self.threads = threads
        self._calls: deque[Call | SampleCall] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Call | SampleCall) -> None:
        """Queue a call. Raises HttpError when the server is shutting down."""
        with self._changed:
            if self._ended:
                raise HttpError(503, "the server is shutting down")
            self._calls.append(call)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Drop a sample request that still waits; its result is an error."""
        with self._changed:
            dropped = [
                call
                for call in self._calls
                if isinstance(call, SampleCall) and call.request_id == request_id
            ]
            for call in dropped:
                self._calls.remove(call)
        for call in dropped:
            call.on_done(None, HttpError(499, "the client cancelled the request"))

    def end(self, wait_s: float = 10.0) -> bool:
        """Stop after the present call; return whether the thread has stopped."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # ---- in the worker's thread

    def _run(self) -> None:
        if self.threads:
            set_threads(self.threads)
        while calls := self._take():
            try:
                results = self._compute(calls)
            except USER_ERRORS as error:
                _fail(calls, error)
            except Exception as error:  # the request fails, the server continues
                traceback.print_exc(file=sys.stderr)
                _fail(calls, error)
            else:
                for call, result in zip(calls, results, strict=True):
                    call.on_done(result, None)

    def _take(self) -> Sequence[Call] | Sequence[SampleCall]:
        """Wait for work; return one call, or all sample calls that can run together with it.

        Returns nothing at the end.
        """
        with self._changed:
            while not self._calls and not self._ended:
                self._changed.wait()
            if self._ended:
                return []
            first = self._calls.popleft()
            if isinstance(first, Call):
                return [first]
            together = [first]
            for call in list(self._calls):
                if isinstance(call, SampleCall) and _fits(call, first):
                    together.append(call)
                    self._calls.remove(call)
            return together

    def _compute(self, calls: Sequence[Call] | Sequence[SampleCall]) -> list[Any]:
        first = calls[0]
        if isinstance(first, Call):
            return [first.function()]
        samples = [call for call in calls if isinstance(call, SampleCall)]
        requests = [call.request for call in samples]
        weights = first.weights()
        with memory_errors_as(RunError):
            results: list[SampleResult] = self.model.sample(weights, first.sampling, requests)
        return results


def _fits(call: SampleCall, first: SampleCall) -> bool:
    return call.sampler_id == first.sampler_id and call.sampling == first.sampling


def _fail(calls: Sequence[Call] | Sequence[SampleCall], error: BaseException) -> None:
    for call in calls:
        call.on_done(None, error)
