"""The worker of a server over pages, with a decoder that records what each token sees."""

import asyncio
import importlib.util
from typing import Any

import pytest
import torch
from refused import refused

from postgrad.errors import CacheMemoryError
from postgrad.net.bodies import HttpError
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.sequence import Job
from postgrad.serving.worker import DecodeWorker, PendingRequest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from recording_decoder import RecordingDecoder, RecordingEngine, expected, long_seeds

from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.tables import BufferSizes

LIMIT = 250


def make_worker(
    num_pages: int, capacity: int, stopping: Any = lambda: False, decoder: Any = None
) -> DecodeWorker:
    engine = RecordingEngine(num_pages)
    engine.decoder = decoder or engine.decoder
    return DecodeWorker(engine, capacity, 320, 16, num_pages, stopping)


async def tokens_of(pending: PendingRequest) -> list[int] | int:
    """Return the tokens of a request of one row, or the status of its error."""
    tokens: list[int] = []
    while True:
        update = await asyncio.wait_for(pending.updates.get(), 60)
        if isinstance(update, HttpError):
            return update.status
        tokens += update.tokens
        if update.finish:
            return tokens


def test_a_preempted_row_that_has_begun_ends_though_the_server_stops(monkeypatch):
    """Only the request that never had a row in the batch is refused."""
    preempted: list[int] = []
    preempt = Scheduler.preempt

    def preempt_and_stop(scheduler: Scheduler, row: Any) -> None:
        preempted.append(row.num_tokens)
        preempt(scheduler, row)

    monkeypatch.setattr(Scheduler, "preempt", preempt_and_stop)
    requests = [Request([3, 4], [seed], LIMIT) for seed in long_seeds([3, 4], LIMIT, 3)]

    async def ask() -> list[list[int] | int]:
        worker = make_worker(7, 2, lambda: bool(preempted))
        sampling = Sampling(1.0, LIMIT)
        all_pending = [
            PendingRequest([Job(request, sampling)], per_token=True) for request in requests
        ]
        for pending in all_pending:
            worker.submit(pending)
        answers = await asyncio.gather(*map(tokens_of, all_pending))
        assert worker.rows == 0 and worker.end()
        return answers

    answers = asyncio.run(ask())
    assert preempted[0] > 0
    assert answers[:2] == [
        expected(request, 0, Sampling(1.0, LIMIT)).tokens for request in requests[:2]
    ]
    assert answers[2] == 503


class FullDecoder(RecordingDecoder):
    """A decoder whose cache does not fit on the device, or whose steps find no memory."""

    def __init__(self, in_step: bool) -> None:
        super().__init__()
        self.in_step = in_step

    def reserve(self, sizes: BufferSizes) -> None:
        if not self.in_step:
            raise CacheMemoryError("the cache needs 9.0 GiB", "lower rollout.cache_gib")
        super().reserve(sizes)

    def run(self, rows: int, steps: int, *extras: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


@pytest.mark.parametrize("num_pages", [6, 7, 8], ids=["too few pages", "no cache", "no memory"])
def test_a_lack_of_memory_names_the_options_of_the_server(num_pages, capfd):
    """A run's settings do not exist here. Clients read this line, and the server continues."""

    async def ask() -> str:
        worker = make_worker(num_pages, 2, decoder=FullDecoder(in_step=num_pages == 8))
        pending = PendingRequest([Job(Request([3], [1], 5), Sampling())], per_token=False)
        worker.submit(pending)
        error = await asyncio.wait_for(pending.updates.get(), 60)
        assert isinstance(error, HttpError) and error.status == 500
        assert worker.alive and worker.rows == 0 and worker.end()
        return error.reason

    reason = asyncio.run(ask())
    assert "--rows" in reason and "--context" in reason and "rollout." not in reason
    assert "GiB" in reason and "\n" not in reason


@pytest.mark.parametrize("failing", ["load", "warm_up_server"])
def test_a_model_that_does_not_fit_is_refused_in_one_line(tiny, monkeypatch, failing):
    from postgrad.config.schema import ModelConfig
    from postgrad.serving import served_model

    def fail(*_: object) -> None:
        if failing == "warm_up_server":
            raise CacheMemoryError("the cache needs 9.0 GiB", "lower rollout.cache_gib")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    owner = served_model if failing == "load" else served_model.NativeEngine
    monkeypatch.setattr(owner, failing, fail)
    with refused("too_large") as caught:
        config = ModelConfig(path=str(tiny), device="cpu", dtype="float32")
        served_model.load_served_model("tiny", config, 4, 64, 8, lambda: False)
    wanted = "--dtype" if failing == "load" else "--context"
    assert wanted in str(caught.value) and "rollout." not in str(caught.value)
