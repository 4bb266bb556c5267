"""The page tables of conversations on a GPU, with a decoder that records what each token sees."""

import importlib.util
import random
from typing import Any

import pytest

from postgrad.config.schema import RolloutConfig
from postgrad.rollout.engine import Completion, Request, Sampling

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from recording_decoder import (
    STOP_ID,
    RecordingDecoder,
    RecordingEngine,
    expected,
    nothing_is_lost,
)

from postgrad.rollout.continuous import ContinuousEngine
from postgrad.rollout.native import store_pages
from postgrad.rollout.native import tables as state_lines
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_slots import SlotStore
from postgrad.rollout.native.stream import NativeStream


def open_stream(
    num_pages: int, sampling: Sampling, num_rows: int, captures: bool = False
) -> NativeStream:
    stream: Any = RecordingEngine(num_pages, 16, captures).open_stream(sampling, num_rows)
    assert isinstance(stream, NativeStream) and stream.pages is not None
    return stream


def play(num_pages: int, captures: bool) -> tuple[NativeStream, int]:
    """Let three groups of four conversations take four turns each, with pauses, and check each.

    Returns the closed stream and the number of tokens of all prompts together.
    """
    chance = random.Random(3)
    sampling = Sampling(1.0, 300, stop=("!",))  # "!" is token 0
    stream = open_stream(num_pages, sampling, 12, captures)
    requests: dict[int, Request] = {}
    paused: list[int] = []
    turns = dict.fromkeys(range(12), 0)
    num_tokens = 0
    with stream:
        for group, length in enumerate((1, 70, 129)):
            prompt = [chance.randrange(1, STOP_ID) for _ in range(length)]
            request = Request(prompt, [10 * group + i for i in range(4)], 250)
            keys = list(range(4 * group, 4 * group + 4))
            requests |= dict.fromkeys(keys, request)
            stream.add(request, keys)
        while stream.busy or paused:
            for key, completion in stream.poll():
                request = requests[key]
                num_tokens += len(request.prompt)
                index = key % 4 if turns[key] == 0 else 0
                correct = expected(request, index, sampling)
                assert completion.tokens == correct.tokens and completion.finish == correct.finish
                assert completion.logprobs[0] == -len(request.prompt)
                turns[key] += 1
                if turns[key] == 4:
                    stream.forget(key)
                    continue
                new = [chance.randrange(1, STOP_ID) for _ in range(chance.randrange(70))]
                text = [*request.prompt, *completion.tokens, *new, 7]
                requests[key] = Request(text, [100 * key + turns[key]], 60)
                paused.append(key)
            chance.shuffle(paused)
            while paused and (not stream.busy or chance.random() < 0.4):
                key = paused.pop()
                stream.add(requests[key], [key])
    return stream, num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("captures", [False, True], ids=["passes", "captured"])
@pytest.mark.parametrize("num_pages", [400, 24, 12])
def test_each_turn_sees_exactly_its_conversation(num_pages, captures, monkeypatch):
    monkeypatch.setattr(store_pages, "STEPS_PER_SYNC", 5)
    stream, num_tokens = play(num_pages, captures)
    assert nothing_is_lost(stream.pages.pool) and not stream.pages.pool.turns
    share = sum(stream.engine.num_prefilled) / num_tokens
    if num_pages == 400:
        assert share < 0.25, "earlier turns are not computed again"
    else:
        assert share > 0.7, "there is no room to keep all of them"


SAMPLING = Sampling(1.0, 30, stop_ids=(50,))


def take_turn(stream: NativeStream, prompt: list[int], seed: int, key: str = "a") -> Completion:
    request = Request(list(prompt), [seed], 30)
    stream.add(request, [key])
    found: list[Completion] = []
    while stream.busy:
        found += [completion for _, completion in stream.poll()]
    (completion,) = found
    correct = expected(request, 0, SAMPLING)
    assert completion.tokens == correct.tokens and completion.finish == correct.finish
    return completion


def prefilled(stream: NativeStream) -> list[int]:
    """Return the number of tokens of each prefill pass so far; the list is then empty."""
    sizes = stream.engine.num_prefilled.copy()
    stream.engine.num_prefilled.clear()
    return sizes


def test_new_weights_compute_a_prompt_again():
    """Rows that wait, and rows that join, do not read keys of older weights."""
    prompt = [5] * 100
    seeds: list[int] = []
    while len(seeds) < 11:
        seed = seeds[-1] + 1 if seeds else 0
        while len(expected(Request(prompt, [seed], 30), 0, SAMPLING).tokens) < 30:
            seed += 1
        seeds.append(seed)
    with open_stream(200, SAMPLING, 8) as stream:
        stream.add(Request(prompt, seeds[:9], 30), list(range(9)))  # 8 rows decode, one waits
        stream.poll()
        assert prefilled(stream) == [99]
        stream.refresh_weights()
        stream.add(Request(prompt, seeds[9:], 30), [9, 10])
        found = dict(stream.poll())
        while stream.busy:
            found |= dict(stream.poll())
        assert prefilled(stream) == [99], "one more time, for the three rows"
        assert nothing_is_lost(stream.pages.pool)
    assert len(found) == 11


def test_a_turn_computes_only_its_new_tokens():
    with open_stream(200, SAMPLING, 2) as stream:
        prompt = [5] * 100
        text = [*prompt, *take_turn(stream, prompt, 1).tokens, 8, 9, 10]
        assert prefilled(stream) == [99]
        text += take_turn(stream, text, 2).tokens
        assert prefilled(stream) == [3], "the last sampled token and 8 and 9; then 10 is decoded"
        take_turn(stream, [*text, 1, 2], 3, key="b")
        assert prefilled(stream) == [len(text) + 1], "another key has nothing"
        take_turn(stream, [6, *text], 4)
        assert prefilled(stream) == [len(text)], "another text under the same key"
        stream.forget("a")
        take_turn(stream, [6, *text, 3], 5)
        assert prefilled(stream) == [len(text) + 1]


@pytest.mark.slow
def test_a_long_stream_does_not_grow():
    """Requests are dropped when no row needs them, and turns still continue kept pages."""
    with open_stream(200, SAMPLING, 2) as stream:
        for number in range(60):
            prompt = [5 + number % 20] * (20 + number)
            completion = take_turn(stream, prompt, number, key=f"{number}")
            prefilled(stream)
            take_turn(stream, [*prompt, *completion.tokens, 8, 9], number, key=f"{number}")
            assert prefilled(stream) == [2]
            stream.forget(f"{number}")
        pool = stream.pages.pool
        assert not stream.jobs and not pool.turns
        assert sum(len(prompt.pages) for prompt in pool.prompts.values()) <= pool.num_pages


def test_new_weights_drop_what_is_kept():
    with open_stream(200, SAMPLING, 2) as stream:
        prompt = [5] * 10
        text = [*prompt, *take_turn(stream, prompt, 1).tokens, 8, 9]
        stream.engine.weights_version += 1
        prefilled(stream)
        more = [*text, *take_turn(stream, text, 2).tokens, 8]
        assert prefilled(stream) == [len(text) - 1]
        take_turn(stream, more, 3)
        assert prefilled(stream) == [1], "the new weights' own pages are kept"


def test_new_weights_compute_the_same_prompt_again():
    with open_stream(200, SAMPLING, 2) as stream:
        prompt = [5] * 10
        take_turn(stream, prompt, 1, key="a")
        take_turn(stream, prompt, 2, key="b")
        assert prefilled(stream) == [9], "the second row shares the prompt of the kept one"
        stream.refresh_weights()
        take_turn(stream, prompt, 3, key="c")
        assert prefilled(stream) == [9]


def test_a_row_that_decodes_while_weights_change_is_not_kept():
    with open_stream(200, SAMPLING, 2) as stream:
        request = Request([5] * 10, [2], 30)
        stream.add(request, ["a"])
        assert not stream.poll(), "it takes more than one poll"
        stream.engine.weights_version += 1
        ((_, completion),) = stream.poll()
        prefilled(stream)
        text = [*request.prompt, *completion.tokens, 8]
        take_turn(stream, text, 3)
        assert prefilled(stream) == [len(text) - 1]


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
    with open_stream(200, SAMPLING, 16) as stream:
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


class VersionedDecoder(RecordingDecoder):
    """The log-prob of a token is minus the version of the weights that sampled it."""

    version = 0

    def step(self, row: int) -> None:
        slot = int(self.state[state_lines.SLOT, row])
        num_sampled = int(self.state[state_lines.NUM_OWN, row])
        super().step(row)
        self.logprobs[slot, num_sampled] = -float(self.version)


def open_continuous(num_pages: int, limit: int) -> tuple[ContinuousEngine, VersionedDecoder]:
    inner = RecordingEngine(num_pages)
    inner.publish = lambda weights: None  # type: ignore[method-assign]
    decoder = inner.decoder = VersionedDecoder()
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
