"""One contract for engines, wherever they are: in this process, in a child, behind a server. Then what only a server can do wrong."""

import time

import pytest
from served import MODEL, serve
from world import END, config_of

from postgrad.cluster import place
from postgrad.cluster.host import build_host
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError, RunError
from postgrad.model.load import load_tokenizer
from postgrad.rollout import http
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import Address, HttpChat, HttpEngine
from postgrad.types import Failure

REQUESTS = [Request([1, 2, 3], [11, 12, 13]), Request([4, 15], [21]), Request([9, 8, 7, 6], [31, 32], 3), Request([5], [])]
PLACES = ("native", "hf", "process", "http")


@pytest.fixture(scope="module")
def native(tiny):
    return build_host(config_of("grpo", tiny)).engine


@pytest.fixture(scope="module")
def prompts(tiny):
    return Prompts(load_tokenizer(config_of("grpo", tiny).model), "plain")


@pytest.fixture(scope="module")
def engines(tiny, native, prompts):
    with place(config_of("grpo", tiny, "cluster.place=process")) as placed, serve(engine=native, prompts=prompts) as served:
        yield {
            "native": native,
            "hf": build_host(config_of("grpo", tiny, "rollout.engine=hf")).engine,
            "process": placed.engine,
            "http": HttpEngine(Address.of(served.address), prompts, 60),
        }


@pytest.fixture(params=PLACES)
def engine(request, engines):
    return engines[request.param]


def test_completions_come_in_the_order_of_requests_and_seeds(engine, native):
    done = engine.generate(REQUESTS, Sampling(1.0, 8))
    assert [len(group) for group in done] == [3, 1, 2, 0]
    assert [[c.tokens for c in group] for group in done] == [
        [c.tokens for c in g] for g in native.generate(REQUESTS, Sampling(1.0, 8))
    ]
    assert len({tuple(c.tokens) for c in done[0]}) > 1, "each seed has a continuation of its own"


def test_the_same_seeds_give_the_same_and_neighbours_do_not_matter(engine):
    together = engine.generate(REQUESTS, Sampling(1.0, 8))
    assert [c.tokens for c in engine.generate(REQUESTS[2:3], Sampling(1.0, 8))[0]] == [c.tokens for c in together[2]]
    assert engine.generate(REQUESTS, Sampling(1.0, 8)) == together


def test_limits_hold_and_the_finish_says_why(engine):
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, Sampling(1.0, 8)), strict=True):
        limit = min(8, request.max_new_tokens or 8)
        for done in group:
            assert 1 <= len(done.tokens) <= limit
            assert (done.finish == "stop") == (done.tokens[-1] == END) and (done.finish == "stop" or len(done.tokens) == limit)


def test_log_probs_are_those_of_the_sampled_tokens(engine, native):
    mine, truth = (e.generate(REQUESTS, Sampling(1.0, 8)) for e in (engine, native))
    assert [p for g in mine for c in g for p in c.logprobs] == pytest.approx(
        [p for g in truth for c in g for p in c.logprobs], abs=1e-5
    )
    assert all(len(c.logprobs) == len(c.tokens) for g in mine for c in g)


def test_greedy_ignores_the_seed(engine):
    first = engine.generate([Request([1, 2, 3], [1, 2])], Sampling(0.0, 6))[0]
    assert first[0].tokens == first[1].tokens


def test_nothing_asked_nothing_said(engine):
    assert engine.generate([], Sampling()) == []


def test_what_does_not_fit_is_a_run_error(engine):
    with pytest.raises(RunError):
        engine.generate([Request([1] * 600, [0])], Sampling(1.0, 8))


# ---- servers


def test_a_server_gets_one_call_a_seed_and_never_more_than_allowed_at_once(native, prompts):
    with serve(engine=native, prompts=prompts) as served:
        engine = HttpEngine(Address.of(served.address), prompts, 60, concurrency=3)
        engine.generate([Request([1, 2], list(range(12)))], Sampling(1.0, 2))
        assert sorted(body["seed"] for body in served.asked) == list(range(12)) and 1 < served.busiest <= 3
        assert all(body["n"] == 1 and body["model"] == MODEL and body["prompt"] == [1, 2] for body in served.asked)
        assert engine.max_context == 512 and not engine.shares_weights


def test_a_server_that_refuses_ids_gets_text_and_is_not_asked_twice_again(native, prompts):
    greedy = Sampling(0.0, 5)
    with serve(engine=native, prompts=prompts, takes_ids=False, gives_ids=False) as served:
        engine = HttpEngine(Address.of(served.address), prompts, 60, concurrency=1)
        done = engine.generate(REQUESTS[:2], greedy)
        truth = native.generate(REQUESTS[:2], greedy)
        assert [[c.tokens for c in g] for g in done] == [[c.tokens for c in g] for g in truth]
        assert all(c.logprobs == [] for g in done for c in g)
        assert [isinstance(body["prompt"], str) for body in served.asked] == [False, True, True, True, True]


def test_a_server_that_is_away_for_a_moment_is_asked_again(native, prompts, monkeypatch):
    monkeypatch.setattr(http, "PAUSES_S", (0.01,))
    moods = {0: (503, "busy"), 1: (429, {"error": {"message": "slow down"}}), 2: (200, b"no json"), 3: (0, None)}
    with serve(engine=native, prompts=prompts, mood=lambda n, body: moods.get(n)) as served:
        engine = HttpEngine(Address.of(served.address), prompts, 60, concurrency=1)
        assert engine.generate(REQUESTS[1:2], Sampling(1.0, 4)) == native.generate(REQUESTS[1:2], Sampling(1.0, 4))
        assert len(served.asked) == 5


def test_waiting_ends_and_names_the_address_and_the_trouble(native, prompts, monkeypatch):
    monkeypatch.setattr(http, "PAUSES_S", (0.05,))
    with serve(engine=native, prompts=prompts, mood=lambda n, body: (503, {"error": {"message": "loading"}})) as served:
        engine = HttpEngine(Address.of(served.address), prompts, wait_s=0.5)
        began = time.monotonic()
        with pytest.raises(
            RunError, match=rf"did not answer POST {served.url}/completions within .* \(the last: status 503: loading\)"
        ):
            engine.generate(REQUESTS, Sampling())
        assert time.monotonic() - began < 10


def test_a_silent_server_is_not_waited_for_longer_than_allowed(native, prompts):
    with serve(engine=native, prompts=prompts, mood=lambda n, body: time.sleep(3)) as served:
        engine = HttpEngine(Address.of(served.address), prompts, wait_s=0.4)
        began = time.monotonic()
        with pytest.raises(RunError, match="timed out"):
            engine.generate(REQUESTS[1:2], Sampling())
        assert time.monotonic() - began < 2.5


def test_a_refusal_is_told_once_and_not_tried_again(native, prompts):
    with serve(engine=native, prompts=prompts, mood=lambda n, body: (401, {"error": {"message": "no key"}})) as served:
        with pytest.raises(RunError, match="refused a completion of model tiny with 401: no key"):
            HttpEngine(Address.of(served.address), prompts, 60, concurrency=1).generate(REQUESTS, Sampling())
        assert len(served.asked) == 1, "those that had not begun are left"


def test_nobody_there_and_no_such_model_are_the_users_to_mend(native, prompts, monkeypatch):
    monkeypatch.setattr(http, "START_S", 0.3)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1 did not answer GET .*Connection.*; start the server there"):
        HttpEngine(Address.of("http://127.0.0.1:9/v1#m"), prompts)
    with (
        serve(engine=native, prompts=prompts) as served,
        pytest.raises(ConfigError, match=r"has no model tinny; did you mean tiny\?"),
    ):
        HttpEngine(Address.of(f"{served.url}#tinny"), prompts)
    for wrong in ("http://host:1/v1", "ftp://host#m", "http://#m", "http://host:port/v1#m"):
        with pytest.raises(ConfigError, match="write it as http://host:8000/v1#model"):
            Address.of(wrong)


def test_weights_cannot_be_published_to_a_server(native, prompts):
    with serve(engine=native, prompts=prompts) as served, pytest.raises(RunError, match="cannot take new weights"):
        HttpEngine(Address.of(served.address), prompts).publish({})


def test_chat_answers_in_order_with_the_key_and_refusals_are_failures(monkeypatch):
    monkeypatch.setenv("POSTGRAD_API_KEY", "secret")

    def mood(number, body):
        return (400, {"error": {"message": "too long"}}) if body["messages"][0]["content"] == "b" else None

    with serve(chat=lambda text: text * 2, mood=mood) as served:
        said = HttpChat(Address.of(served.address), 60, 4).reply(
            [[{"role": "user", "content": c}] for c in "abc"], Sampling(0.0, 9), [1, 2, 3]
        )
        assert said[0] == "aa" and said[2] == "cc" and isinstance(said[1], Failure) and "400: too long" in said[1].reason
        assert {body["key"] for body in served.asked} == {"Bearer secret"} and {body["max_tokens"] for body in served.asked} == {9}
