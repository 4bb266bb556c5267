"""What only pages have: a stream and calls beside it share them, and weights change meanwhile."""

from pathlib import Path
from typing import Any

import pytest
from interpreted import run_interpreted
from recording_decoder import RecordingDecoder, RecordingEngine, expected, nothing_is_lost

from postgrad.config.schema import RolloutConfig
from postgrad.rollout.continuous import ContinuousEngine
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.native import prefill, store_pages, tables
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_slots import SlotStore

SAMPLING = Sampling(1.0, 30, stop_ids=(50,))


class VersionedDecoder(RecordingDecoder):
    """The log-prob of a token is minus the version of the weights that sampled it."""

    version = 0

    def step(self, row: int) -> None:
        slot = int(self.state[tables.SLOT, row])
        place = int(self.state[tables.NUM_OWN, row]) % self.sizes.length
        super().step(row)
        self.logprobs[slot, place] = -float(self.version)


def open_continuous(num_pages: int, limit: int) -> tuple[ContinuousEngine, VersionedDecoder]:
    inner = RecordingEngine(num_pages)
    inner.publish = lambda weights: None  # type: ignore[method-assign]
    decoder: Any = VersionedDecoder()
    inner.decoder = decoder
    rollout = RolloutConfig(max_response_tokens=limit)
    return ContinuousEngine(inner, rollout, poll_s=0.0), decoder


def test_tokens_of_a_call_after_new_weights_have_their_version(monkeypatch):
    """Weights are published, then a validation decodes the stream's rows, then comes the poll."""
    monkeypatch.setattr(store_pages, "STEPS_PER_SYNC", 5)
    engine, decoder = open_continuous(400, 60)
    engine.publish({})  # of version 0, as at the start of a run
    requests = {str(i): Request([i + 1] * 5, [2 * i, 2 * i + 1], 60) for i in range(4)}
    rows = list(engine.poll(0, list(requests), requests)["finished"])
    for version in (1, 2, 3):
        engine.publish({})
        decoder.version = version
        engine.generate([Request([9] * 3, [version], 7)], Sampling(0.0, 7))
        rows += engine.poll(version, list(engine.unfinished), {})["finished"]
    while engine.unfinished:
        rows += engine.poll(3, list(engine.unfinished), {})["finished"]
    assert len(rows) == 8
    for _, _, completion in rows:
        assert completion.versions == [-logprob for logprob in completion.logprobs]
    assert {version for _, _, completion in rows for version in completion.versions} >= {0, 1, 2}


@pytest.mark.parametrize("num_pages", [400, 12])
def test_rows_go_on_while_weights_change_and_preempted_ones_begin_again(num_pages, monkeypatch):
    """With 12 pages rows are preempted: their tokens are sampled again by newer weights."""
    monkeypatch.setattr(store_pages, "STEPS_PER_SYNC", 5)
    sampling = Sampling(1.0, 250)
    engine, decoder = open_continuous(num_pages, 250)
    requests = {str(i): Request([i + 1] * (30 * i + 1), [2 * i, 2 * i + 1]) for i in range(5)}
    added = requests
    names = list(requests)
    rows: dict[tuple[str, int], Completion] = {}
    preempted: list[Any] = []
    preempt = Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda *arguments: preempted.append(1) or preempt(*arguments)
    )
    for number in range(2000):
        decoder.version = int(3 * number**0.5)  # at no regular times
        if number == 4:
            names.remove("3")  # it is canceled
        names = [name for name in names if name in engine.unfinished or added]
        result = engine.poll(decoder.version, names, added)
        added = {}
        rows |= {(name, index): completion for name, index, completion in result["finished"]}
        if not engine.unfinished:
            break
    assert {name for name, _ in rows} == {"0", "1", "2", "4"} and len(rows) == 8
    for (name, index), completion in rows.items():
        assert completion.tokens == expected(requests[name], index, sampling).tokens
        assert completion.versions == [-logprob for logprob in completion.logprobs]
    assert bool(preempted) == (num_pages == 12)
    assert any(len(set(completion.versions or [])) > 3 for completion in rows.values())
    store: Any = engine.stream.pages  # type: ignore[attr-defined]
    assert nothing_is_lost(store.pool), "no page is lost"
    assert len(set(store.free_slots)) == store.capacity, "no slot is lost"


def test_one_stream_at_a_time_has_the_pages(monkeypatch):
    engine = RecordingEngine(200)
    with engine.open_stream(SAMPLING, 2) as first:
        assert first.pages is not None
        monkeypatch.setattr(SlotStore, "reload_weights", lambda store: None)
        second = engine.open_stream(SAMPLING, 2)
        assert isinstance(second.scheduler.store, SlotStore)
        keeps_ids = Sampling(1.0, 2, top_p=0.5, record_kept=True)
        scheduler = engine._scheduler_for([Job(Request([1, 2], [3], 2), keeps_ids)], keeps_ids)
        assert isinstance(scheduler.store, SlotStore), "pages cannot tell the ids that are kept"
    assert engine.open_stream(SAMPLING, 2).pages is not None


def test_calls_of_generate_decode_beside_the_rows_of_a_stream():
    """They have other sampling parameters; rows that end meanwhile are in the next poll."""
    sampling = Sampling(0.0, 40, stop=("!",))
    with RecordingEngine(200).open_stream(SAMPLING, 16) as stream:
        requests = {key: Request([5] * (key + 3), [key], 30) for key in range(6)}
        for key, request in requests.items():
            stream.add(request, [key])
        ended: dict[int, Completion] = dict(stream.poll())
        asked = [Request([7] * 70, [1, 2], 25), Request([8], [], 9), Request([9], [3], 30)]
        assert stream.has_room([Job(request, sampling) for request in asked])
        assert not stream.has_room([Job(Request([7], [1]), Sampling(1.0, 600))]), (
            "longer than buffers"
        )
        groups = stream.engine.generate(asked, sampling)
        for request, completions in zip(asked, groups, strict=True):
            assert len(completions) == len(request.seeds)
            for index, completion in enumerate(completions):
                correct = expected(request, index, sampling)
                assert completion.tokens == correct.tokens and completion.finish == correct.finish
        assert stream.ended and stream.busy
        while stream.busy:
            ended |= dict(stream.poll())
        assert len(ended) == 6
        for key, completion in ended.items():
            assert completion.tokens == expected(requests[key], 0, SAMPLING).tokens
        assert nothing_is_lost(stream.pages.pool)


def test_jobs_with_the_same_prompt_share_its_pages():
    engine = RecordingEngine(60)
    scheduler = engine.open_server(4, 320, 60)
    for seeds in ([1, 2, 3], [4]):
        scheduler.add(Job(Request([3] * 70, seeds, 20), Sampling(), is_watched=True))
        scheduler.step()
    assert engine.num_prefilled == [69]


@pytest.mark.parametrize(("max_keys", "by_rows"), [(69 * 69, True), (69 * 69 - 1, False)])
def test_rows_that_would_read_too_many_keys_are_computed_in_a_pass(max_keys, by_rows, monkeypatch):
    steps: list[int] = []
    run_prefill = RecordingDecoder.run_prefill

    def counted(decoder: RecordingDecoder) -> None:
        steps.append(1)
        run_prefill(decoder)

    monkeypatch.setattr(RecordingDecoder, "run_prefill", counted)
    monkeypatch.setattr(prefill, "MAX_CAPTURED_KEYS", max_keys)
    engine = RecordingEngine(60, captures=True)
    scheduler = engine.open_server(4, 320, 60)
    scheduler.add(Job(Request([3] * 70, [1], 20), Sampling(), is_watched=True))
    scheduler.step()
    assert engine.num_prefilled == [69] and bool(steps) == by_rows


def test_passes_are_compiled_before_requests_come():
    """For counts of tokens that 16 divides and others, in pages that stay free."""
    engine = RecordingEngine(60, captures=True)
    engine.warm_up_server(4, 320, 60)
    assert {count % 16 == 0 for count in engine.num_prefilled} == {True, False}
    request = Request([3] * 70, [1, 2], 90)
    job = Job(request, Sampling(), is_watched=True)
    scheduler = engine.open_server(4, 320, 60)
    scheduler.add(job)
    while scheduler.busy:
        scheduler.step()
    for index, completion in enumerate(job.completions):
        assert completion.tokens == expected(request, index, Sampling(1.0, 90)).tokens


def test_larger_buffers_wait_until_no_row_decodes():
    sampling = Sampling(1.0, 600)
    requests = {"a": Request([3], [1], 200), "b": Request([4] * 300, [2], 600)}
    found: dict[Any, Completion] = {}
    with RecordingEngine(400).open_stream(sampling, 4) as stream:
        for key, request in requests.items():
            stream.add(request, [key])
            found |= dict(stream.poll())
            assert [row.key for row in stream.scheduler.running] == ["a"][: not found]
            sizes = stream.pages.decoder.sizes
        while stream.busy:
            found |= dict(stream.poll())
        assert stream.pages.decoder.sizes.length > sizes.length
    for key, request in requests.items():
        assert found[key].tokens == expected(request, 0, sampling).tokens


SERVERS = """
import json, socket, sys, threading
import torch
from postgrad.rollout.native import tables
tables.PREFILL_ROWS = 32  # the interpreter is slow; the other modules copy it
sys.path.insert(0, sys.argv[2])
from serve_process import live, running, wait_for
from postgrad.net import server as net_server
from postgrad.model.kernels.install import install_kernels
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.store_pages import PageStore
from postgrad.serving.app import make_app
from postgrad.serving.served_model import ServedModel
from postgrad.serving.worker import DecodeWorker

torch.set_num_threads(1)
IDS = {"model": "tiny", "return_token_ids": True}
REQUESTS = [
    {"prompt": [1, 10, 2, 15], "max_tokens": 6, "temperature": 0, "logprobs": 3},
    {"prompt": [1, 10, 2, 15], "max_tokens": 5, "seed": 5, "n": 2, "logprobs": 0},
    {"prompt": [7, 15], "max_tokens": 5, "seed": 3, "temperature": 1.7, "top_p": 0.6},
    {"prompt": [i * 7 % 16 for i in range(70)], "max_tokens": 3, "seed": 8, "top_k": 3,
     "logprobs": 2, "echo": True},
    {"prompt": [3, 12], "max_tokens": 8, "seed": 4, "stop": ["7", "+"], "stop_token_ids": [9]},
]
LONG = {"model": "tiny", "prompt": [1], "max_tokens": 400, "temperature": 0, "stream": True}

def ask_all(server):
    answers = {}
    def ask(number):
        status, answer, _ = server.ask("/v1/completions", REQUESTS[number] | IDS)
        assert status == 200, answer
        answers[number] = answer["choices"]
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(REQUESTS))]

def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 1e-4 if isinstance(a, float) else a == b

with live(sys.argv[1]) as server:
    plain = ask_all(server)
    engine = server.served.worker.engine
install_kernels(engine.model)
decoder = engine.decoder = Decoder(engine.model, engine.stop_ids)
worker = DecodeWorker(engine, 8, 512, 64, 24 * decoder.page_bytes())
served = ServedModel("tiny", sys.argv[1], engine.tokenizer, worker)
joined = []
add_column = PageStore._add_column

def add_counted(store, *arguments):
    joined.append(len(store.rooms))
    add_column(store, *arguments)

PageStore._add_column = add_counted
num_steps = []
run_prefill = decoder.run_prefill
decoder.run_prefill = lambda: num_steps.append(1) or run_prefill()
if sys.argv[3] == "captured":  # as where decode steps are captured
    PageStore.prefills_by_rows = True
with running(net_server.make_server(make_app([served]), grace_s=5), [served]) as server:
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\n"
    head += b"Content-Type: application/json\\r\\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head + f"Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
        assert b"200 OK" in connection.recv(1000)
        paged = ask_all(server)  # they join the long one
        scheduler = worker._scheduler
        first = scheduler.running[0]
        assert first.job.request.prompt == [1] and first.num_tokens < 400
    wait_for(lambda: server.rows() == 0, "the rows to be freed")
    pool = scheduler.store.pool
    assert pool.make_free(pool.num_pages) and pool.num_pages == decoder.sizes.pages
assert min(joined[1:]) > 0
assert bool(num_steps) == (sys.argv[3] == "captured")
for request, a, b in zip(REQUESTS, plain, paged, strict=True):
    assert same(a, b), (request, a, b)
assert any(choice["finish_reason"] == "stop" for choice in plain[4])
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["passes", "captured"])
def test_a_server_over_pages_gives_the_answers_of_one_over_slots(tiny, prefill):
    """Over HTTP, in Triton's interpreter: text, token ids, log-probs and finish reasons."""
    run_interpreted(SERVERS, tiny, Path(__file__).parents[1], prefill)
