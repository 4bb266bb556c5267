"""One contract for the scheduler: over slots and over pages, for a batch, a stream and a server.

Slots decode a tiny model; each row must give what it gives alone. Pages have a decoder that records
what each token sees, so a wrong page, position or segment is another token.
"""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recording_decoder import (
    STOP_ID,
    VOCABULARY,
    RecordingEngine,
    Tokenizer,
    expected,
    long_seeds,
    nothing_is_lost,
)
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from postgrad.config.schema import RolloutConfig
from postgrad.model.passes.attention import register_attention
from postgrad.rollout.engine import Completion, Request, Sampling, make_stops
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job, Sequence
from postgrad.rollout.native.store_pages import PageStore
from postgrad.rollout.native.store_slots import SlotStore
from postgrad.rollout.native.tables import PREFILL_ROWS

SAMPLING = Sampling(1.0, 30, stop_ids=(50,))
Found = dict[tuple[int, int], Completion]  # by the number of a job and the index of a row


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": STOP_ID,
    "pad_token_id": None,
    "bos_token_id": None,
}


def make_slot_engine(kind: str) -> NativeEngine:
    torch.manual_seed(1)
    if kind == "window":
        model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():  # a new model hardly shows mistakes
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    model.set_attn_implementation(register_attention())
    loaded: Any = SimpleNamespace(model=model, tokenizer=Tokenizer())
    return NativeEngine(loaded, RolloutConfig(max_rows=16))


class House:
    """An engine over slots or pages, and what its rows must be."""

    def __init__(self, kind: str, num_pages: int = 400) -> None:
        self.has_slots = kind in ("slots", "window")
        self.num_pages = 8 if kind == "tight" else num_pages
        self.computed: list[int] = []  # tokens of each pass that computes several per row
        if self.has_slots:
            self.engine = make_slot_engine(kind)
            self.alone = make_slot_engine(kind)
            self.engine.model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)
        else:
            recording = RecordingEngine(self.num_pages, captures=kind == "captured")
            self.engine = recording
            self.computed = recording.num_prefilled

    def _note(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            self.computed.append(kwargs["input_ids"].numel())

    def saved(self, stream: Any) -> set[Any]:
        """Return the keys of the turns that are saved."""
        store = stream.scheduler.store
        return set(store.turns if self.has_slots else store.pool.turns)

    def take_computed(self) -> list[int]:
        sizes = self.computed.copy()
        self.computed.clear()
        return sizes

    def store(self, capacity: int, chunk: int = 0) -> Any:
        if self.has_slots:
            return SlotStore(self.engine, capacity, 0, chunk)
        decoder: Any = self.engine.decoder
        return PageStore(decoder, capacity, lambda: self.num_pages, 4096, joins=True)

    def check(self, request: Request, index: int, sampling: Sampling, row: Completion) -> None:
        if self.has_slots:
            alone = Request(request.prompt, [request.seeds[index]], request.max_new_tokens)
            ((correct,),) = self.alone.generate([alone], sampling)
            assert row.logprobs == pytest.approx(correct.logprobs, abs=2e-5)
        else:
            correct = expected(request, index, sampling)
            assert row.logprobs[0] == -len(request.prompt)
        assert (row.tokens, row.finish) == (correct.tokens, correct.finish)
        assert len(row.logprobs) == len(row.tokens)


KINDS = ["slots", "pages", "captured", "tight"]


def make_work(kind: str) -> list[tuple[Request, Sampling]]:
    """Return requests with different sampling parameters, lengths and stops; two share a prompt."""
    long_prompt = [5 + i % 50 for i in range(130)]
    limits = (20, 9, 15, 12, 1) if kind == "slots" else (200, 90, 150, 120, 1)
    seeds = long_seeds([3] * 70, 200, 3)
    return [
        (Request([3] * 70, seeds, limits[0]), Sampling(1.0, 1 << 30)),
        (Request([4], [4], limits[1]), Sampling(0.0, 1 << 30)),
        (Request([3] * 70, [5], limits[2]), Sampling(0.7, 1 << 30, stop=("!",))),
        (Request(long_prompt, [6, 7], limits[3]), Sampling(1.0, 1 << 30, stop_ids=(50, 51))),
        (Request([9, 8], [8], limits[4]), Sampling(1.0, 1 << 30)),
        (Request([7], [], 5), Sampling(1.0, 1 << 30)),
    ]


def by_sampling(work: list[tuple[Request, Sampling]]) -> Iterator[tuple[Sampling, list[int]]]:
    for sampling in dict.fromkeys(sampling for _, sampling in work):
        yield sampling, [number for number, (_, other) in enumerate(work) if other == sampling]


def as_batch(house: House, work: list[tuple[Request, Sampling]]) -> Found:
    found: Found = {}
    for sampling, numbers in by_sampling(work):
        groups = house.engine.generate([work[number][0] for number in numbers], sampling)
        for number, group in zip(numbers, groups, strict=True):
            found |= {(number, index): row for index, row in enumerate(group)}
    return found


def as_stream(house: House, work: list[tuple[Request, Sampling]]) -> Found:
    found: Found = {}
    for sampling, numbers in by_sampling(work):
        stream: Any = house.engine.open_stream(sampling, 4)
        with stream:
            for number in numbers:
                request = work[number][0]
                stream.add(request, [(number, index) for index in range(len(request.seeds))])
                found.update(stream.poll())
            while stream.busy:
                found.update(stream.poll())
    assert house.engine.model.training, "the engine leaves the model as it was"
    return found


def as_server(house: House, work: list[tuple[Request, Sampling]]) -> Found:
    """Jobs join while others decode; the tokens of each row are read after each step."""
    scheduler = house.engine.open_server(4, 320, house.num_pages)
    read: dict[Sequence, list[int]] = {}
    jobs: list[Job] = []

    def step() -> None:
        ended = scheduler.step()
        assert len(scheduler.running) <= 4
        for row in [*scheduler.running, *ended]:
            read.setdefault(row, []).extend(row.tokens[len(row.tokens) - row.read() :])
            assert read[row] == row.tokens

    num_joined = 0
    for request, sampling in work:
        stops = make_stops(house.engine.tokenizer, sampling)
        num_joined += bool(scheduler.running)
        jobs.append(scheduler.add(Job(request, sampling, stops, is_watched=True)))
        with torch.no_grad():
            step()
    assert num_joined > 1, "jobs join while others decode"
    with torch.no_grad():
        while scheduler.busy:
            step()
    scheduler.store.close()
    found: Found = {}
    for number, job in enumerate(jobs):
        found |= {(number, index): row for index, row in enumerate(job.completions)}
    return found


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each row that gave way."""
    counts: list[int] = []
    preempt = Scheduler.preempt

    def counted(scheduler: Scheduler, row: Sequence) -> None:
        counts.append(row.num_tokens)
        preempt(scheduler, row)

    monkeypatch.setattr(Scheduler, "preempt", counted)
    return counts


@pytest.fixture(autouse=True)
def check_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page and no slot is lost when a store is closed."""

    def close(store: PageStore) -> None:
        assert nothing_is_lost(store.pool)
        assert sorted(store.free_slots) == list(range(store.capacity))

    monkeypatch.setattr(PageStore, "close", close)


@pytest.mark.parametrize("caller", [as_batch, as_stream, as_server])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_gets_its_own_tokens(kind, caller, preempted):
    """Whoever joins, leaves or waits. With few pages rows give way, and continue or begin again."""
    house = House(kind)
    work = make_work(kind)
    found = caller(house, work)
    assert len(found) == sum(len(request.seeds) for request, _ in work)
    for (number, index), row in found.items():
        request, sampling = work[number]
        house.check(request, index, sampling, row)
    assert (max(preempted, default=0) > 0) == (kind == "tight")
    if kind == "captured" and caller is not as_batch:
        assert max(house.computed) <= PREFILL_ROWS


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("window", marks=pytest.mark.nightly),
        pytest.param("slots", marks=pytest.mark.slow),
        *KINDS[1:],
    ],
)
def test_random_orders(kind, seed, preempted):
    """Jobs join, leave, give way and take further turns at random, and weights are reloaded."""
    draw = random.Random(seed)
    house = House(kind)
    if kind == "tight":
        house.num_pages = draw.choice([10, 11])
    longest = 8 if house.has_slots else 200
    sampling = Sampling(1.0, 1 << 30)
    store = house.store(draw.randint(3, 8), draw.choice([0, 3, 7]))
    scheduler = Scheduler(store)
    prompts = [[draw.randrange(5, 90) for _ in range(draw.randrange(1, 150))] for _ in range(4)]
    paused: list[tuple[Any, list[int]]] = []
    jobs: list[Job] = []
    num_ended = 0
    torch.set_grad_enabled(False)

    def add(prompt: list[int], keys: list[Any]) -> None:
        seeds = [draw.randrange(1000) for _ in keys]
        request = Request(prompt, seeds, draw.randrange(1, longest))
        job = Job(request, sampling, keys=keys, is_watched=draw.random() < 0.5)
        jobs.append(scheduler.add(job, first=draw.random() < 0.1))

    while scheduler.busy or paused or len(jobs) < 12:
        if len(jobs) < 12 and draw.random() < 0.9:
            name = len(jobs)
            add(draw.choice(prompts), [(name, i) for i in range(draw.randrange(1, 5))])
        if paused and draw.random() < 0.3:
            key, text = paused.pop(draw.randrange(len(paused)))
            add([*text, *[draw.randrange(5, 90) for _ in range(draw.randrange(1, 20))]], [key])
        if jobs and draw.random() < 0.03:
            scheduler.cancel([draw.choice(jobs)])
        if draw.random() < 0.05:
            scheduler.weights_changed(scheduler.version + 1)
        for row in scheduler.step():
            num_ended += 1
            house.check(row.job.request, row.index, sampling, row.completion())
            versions = row.token_versions()
            assert len(versions) == row.num_tokens and versions == sorted(versions)
            if len(row.text) < 180 and draw.random() < 0.6:
                paused.append((row.key, row.text))
            else:
                store.forget(row.key)
    torch.set_grad_enabled(True)
    assert num_ended > 10
    store.close()
    assert bool(preempted) == (kind == "tight")


def take_turn(house: House, stream: Any, prompt: list[int], seed: int, key: str = "a") -> list[int]:
    """Return the text after a turn, whose tokens are checked."""
    request = Request(list(prompt), [seed], 12)
    stream.add(request, [key])
    found: list[Completion] = []
    while stream.busy:
        found += [completion for _, completion in stream.poll()]
    (completion,) = found
    house.check(request, 0, stream.sampling, completion)
    return [*prompt, *completion.tokens]


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_a_turn_computes_only_its_new_tokens(kind):
    house = House(kind)
    with house.engine.open_stream(Sampling(1.0, 30), 2) as stream:
        text = [*take_turn(house, stream, [5] * 100, 1), 8, 9, 10]
        assert house.take_computed() == [99]
        text = take_turn(house, stream, text, 2)
        assert house.take_computed() == [3], "the last sampled token and 8 and 9; 10 is decoded"
        take_turn(house, stream, [*text, 1, 2], 3, key="b")
        assert house.take_computed() == [len(text) + 1], "another key has nothing"
        take_turn(house, stream, [6, *text], 4)
        assert house.take_computed() == [len(text)], "another text under the same key"
        stream.forget("a")
        take_turn(house, stream, [6, *text, 3], 5)
        assert house.take_computed() == [len(text) + 1]
        for number in range(10):
            take_turn(house, stream, [7] * 30, number, key=str(number))
            stream.forget(str(number))
        assert not stream.jobs and not house.saved(stream) - {"a", "b"}, "it does not grow"


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_new_weights_use_nothing_of_the_old_ones(kind):
    """Not for a turn, nor for a prompt that others share; a row of both weights is not saved."""
    house = House(kind)
    with house.engine.open_stream(Sampling(1.0, 40), 2) as stream:
        text = [*take_turn(house, stream, [5] * 10, 1), 8, 9]
        stream.refresh_weights()
        house.take_computed()
        more = [*take_turn(house, stream, text, 2), 8, 7]
        assert house.take_computed() == [len(text) - 1]
        take_turn(house, stream, more, 3)
        assert house.take_computed() == [2], "what the new weights computed is saved"
        long = long_seeds([5] * 70, 40, 3) if kind == "pages" else [1, 2, 3]
        stream.add(Request([5] * 70, [*long, *range(10)], 40), range(13))  # some wait
        found: dict[Any, Completion] = dict(stream.poll())
        assert house.take_computed() == [69]
        stream.refresh_weights()
        while stream.busy:
            found |= dict(stream.poll())
        assert house.take_computed() == [69], "once more, for the rows that waited"
        assert len(found) == 13 and len(set(found[0].versions)) == 2
        seed = long_seeds([6] * 30, 40, 1)[0] if kind == "pages" else 1
        stream.add(Request([6] * 30, [seed], 40), ["both"])
        assert not stream.poll()
        stream.refresh_weights()
        while stream.busy:
            found |= dict(stream.poll())
        assert len(set(found["both"].versions)) == 2
        text = [*[6] * 30, *found["both"].tokens, 8]
        house.take_computed()
        take_turn(house, stream, text, 4, key="both")
        assert house.take_computed() == [len(text) - 1]


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_rows_of_a_prompt_compute_it_once(kind):
    house = House(kind)
    house.engine.generate([Request([3] * 70, list(range(6)), 5)], Sampling())
    assert house.computed == [69]
