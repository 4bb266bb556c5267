"""A server's requests over pages: each gets its own tokens, whoever joins, leaves or waits."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from interpreted import run_interpreted

from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.stops import make_stops

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from recording_decoder import (
    RecordingDecoder,
    RecordingEngine,
    expected,
    long_seeds,
    nothing_is_lost,
)

from postgrad.rollout.native import prefill
from postgrad.rollout.native.tables import PREFILL_ROWS


class Server:
    """What a server does with a scheduler; it reads the tokens of each row after each step."""

    def __init__(self, num_pages: int, capacity: int = 4, captures: bool = False) -> None:
        engine = RecordingEngine(num_pages, captures=captures)
        self.num_prefilled = engine.num_prefilled
        self.tokenizer = engine.tokenizer
        self.scheduler = engine.open_server(capacity, 320, num_pages)
        self.store: Any = self.scheduler.store
        self.tokens: dict[tuple[Job, int], list[int]] = {}
        self.finish: dict[tuple[Job, int], str] = {}

    def add(self, job: Job) -> None:
        job.is_watched = True
        job.stops = make_stops(self.tokenizer, job.sampling)
        self.scheduler.add(job)

    def step(self) -> None:
        ended = self.scheduler.step()
        for row in [*self.scheduler.running, *ended]:
            key = row.job, row.index
            assert key not in self.finish, "an ended row has no more tokens"
            new = row.tokens[len(row.tokens) - row.read() :]
            self.tokens.setdefault(key, []).extend(new)
            assert self.tokens[key] == row.tokens and len(row.logprobs) == len(row.tokens)
            if row.finish:
                self.finish[key] = row.finish

    def finish_all(self) -> None:
        while self.scheduler.busy:
            self.step()


def make_jobs() -> list[Job]:
    """Jobs with different sampling parameters, lengths and stops; two have the same prompt."""
    long_prompt = [5 + i % 50 for i in range(130)]
    seeds = long_seeds([3] * 70, 200, 3)
    return [
        Job(Request([3] * 70, seeds, 200), Sampling(1.0, 1 << 30)),
        Job(Request([4], [4], 90), Sampling(0.0, 1 << 30)),
        Job(Request([3] * 70, [5], 150), Sampling(0.7, 1 << 30, stop=("!",))),
        Job(Request(long_prompt, [6, 7], 120), Sampling(1.0, 1 << 30, stop_ids=(50, 51))),
        Job(Request([9, 8], [8], 1), Sampling(1.0, 1 << 30)),
    ]


def check(jobs: list[Job], server: Server) -> None:
    for job in jobs:
        for index in range(len(job.request.seeds)):
            correct = expected(job.request, index, job.sampling)
            assert server.tokens[job, index] == correct.tokens
            assert server.finish[job, index] == correct.finish
            assert job.completions[index].tokens == correct.tokens
    assert nothing_is_lost(server.store.pool)
    assert sorted(server.store.free_slots) == list(range(server.store.capacity))


@pytest.mark.parametrize("captures", [False, True], ids=["passes", "captured"])
@pytest.mark.parametrize("num_pages", [60, 8], ids=["ample", "tight"])
def test_each_row_gets_its_own_tokens(num_pages, captures, monkeypatch):
    """With few pages, rows are preempted. They continue after the tokens that were sent.

    A captured prefill computes the same tokens, at most PREFILL_ROWS at a time.
    """
    preempted: list[int] = []
    preempt = Scheduler.preempt

    def counted(scheduler: Scheduler, row: Any) -> None:
        preempted.append(row.num_tokens)
        preempt(scheduler, row)

    monkeypatch.setattr(Scheduler, "preempt", counted)
    server = Server(num_pages, captures=captures)
    jobs = make_jobs()
    joined: list[int] = []
    for job in jobs:
        joined.append(len(server.scheduler.running))
        server.add(job)
        server.step()
    assert max(joined[1:]) > 0, "jobs join while others decode"
    assert len(server.scheduler.running) <= 4
    server.finish_all()
    check(jobs, server)
    assert (max(preempted, default=0) > 0) == (num_pages == 8)
    assert (max(server.num_prefilled) <= PREFILL_ROWS) == captures


@pytest.mark.slow
@pytest.mark.parametrize("captures", [False, True], ids=["passes", "captured"])
@pytest.mark.parametrize("seed", [3, 10, 47])
def test_random_jobs_end_though_pages_are_scarce(seed, captures):
    """The prompt of a row that waits gives up its pages when no active row could go on."""
    rng = random.Random(seed)
    server = Server(rng.choice([7, 8, 9]), rng.choice([2, 3, 8]), captures)
    prompts = [[rng.randrange(5, 90) for _ in range(rng.randrange(1, 300))] for _ in range(4)]
    jobs: list[Job] = []
    for _ in range(12):
        prompt = rng.choice(prompts)
        seeds = [rng.randrange(1000) for _ in range(rng.randrange(1, 4))]
        request = Request(prompt, seeds, rng.randrange(1, 320 - len(prompt)))
        jobs.append(Job(request, Sampling(1.0, 1 << 30)))
        server.add(jobs[-1])
        server.step()
    for _ in range(5000):
        if server.scheduler.busy:
            server.step()
    check(jobs, server)


def test_rows_of_one_prompt_share_its_pages():
    server = Server(60)
    server.add(Job(Request([3] * 70, [1, 2, 3], 20), Sampling()))
    server.step()
    server.add(Job(Request([3] * 70, [4], 20), Sampling()))
    server.step()
    assert server.num_prefilled == [69]


@pytest.mark.parametrize(("max_keys", "by_rows"), [(69 * 69, True), (69 * 69 - 1, False)])
def test_rows_that_would_read_too_many_keys_are_computed_in_a_pass(max_keys, by_rows, monkeypatch):
    steps: list[int] = []
    run_prefill = RecordingDecoder.run_prefill

    def counted(decoder: RecordingDecoder) -> None:
        steps.append(1)
        run_prefill(decoder)

    monkeypatch.setattr(RecordingDecoder, "run_prefill", counted)
    monkeypatch.setattr(prefill, "MAX_CAPTURED_KEYS", max_keys)
    server = Server(60, captures=True)
    server.add(Job(Request([3] * 70, [1], 20), Sampling()))
    server.step()
    assert server.num_prefilled == [69] and bool(steps) == by_rows


def test_passes_are_compiled_before_requests_come():
    """For counts of tokens that 16 divides and others, in pages that stay free."""
    server = Server(60, captures=True)
    server.store.warm_up()
    assert {count % 16 == 0 for count in server.num_prefilled} == {True, False}
    assert nothing_is_lost(server.store.pool)
    jobs = make_jobs()
    for job in jobs:
        server.add(job)
    server.finish_all()
    check(jobs, server)


def test_a_dropped_job_frees_its_pages_and_the_others_go_on():
    server = Server(60)
    jobs = make_jobs()
    for job in jobs:
        server.add(job)
    server.step()
    dropped = {jobs[0], jobs[3]}  # one decodes, one waits
    assert jobs[0] is server.scheduler.running[0].job
    assert jobs[3] in {row.job for row in server.scheduler.waiting}
    num_free = len(server.store.pool.free)
    server.scheduler.cancel(dropped)
    assert len(server.store.pool.free) > num_free
    server.finish_all()
    check([job for job in jobs if job not in dropped], server)
    assert not any(job in dropped for job, _ in server.finish)


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
