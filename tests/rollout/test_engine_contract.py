"""One contract for all engines: in this process, in a child process, behind a server.

The second half tests failures that only servers have.
"""

import importlib.util
import threading

import pytest
import torch
from openai_server import MODEL, serve
from tiny_runs import END, config_of, same_completions, sharpened

from postgrad.cluster.backends import open_models
from postgrad.cluster.host import build_host
from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.environments.lookup import Environments
from postgrad.errors import ConfigError, RunError
from postgrad.model.load.load import load_tokenizer
from postgrad.model.load.tiny import make_tiny
from postgrad.net import client
from postgrad.problem import Problem
from postgrad.rollout import http_client
from postgrad.rollout.conversations import Turns
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpChat, HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.rollout.turns import run_turns
from postgrad.types import Batch, Failure, Trajectory

REQUESTS = [
    Request([1, 2, 3], [11, 12, 13]),
    Request([4, 15], [21]),
    Request([9, 8, 7, 6], [31, 32], 3),
    Request([5], []),
]
OURS = ("native", "hf", "process", "http")  # these draw their tokens from the same random numbers
VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM"),
    ],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Heads as wide as vLLM wants them."""
    return sharpened(
        make_tiny(tmp_path_factory.mktemp("models") / "wide", seed=0, layers=2, width=128, heads=2)
    )


@pytest.fixture(scope="module")
def host(model):
    return build_host(config_of("grpo", model))


@pytest.fixture(scope="module")
def native(host):
    return host.engine


@pytest.fixture(scope="module")
def prompts(model):
    return Encoder(load_tokenizer(config_of("grpo", model).model), "plain")


@pytest.fixture(scope="module")
def process(model):
    with open_models(config_of("grpo", model, "cluster.backend=process")) as placed:
        yield placed.engine


@pytest.fixture(scope="module")
def hf(model):
    return build_host(config_of("grpo", model, "rollout.engine=hf")).engine


@pytest.fixture(scope="module")
def over_http(native, prompts):
    with serve(engine=native, prompts=prompts) as served:
        yield HttpEngine(Address.parse(served.address), prompts, 60)


@pytest.fixture(scope="module")
def vllm(model):
    return build_host(
        config_of(
            "grpo", model, "rollout.engine=vllm", "rollout.cache_gib=0.25", "rollout.max_rows=16"
        )
    ).engine


FIXTURES = {"http": "over_http"}
# A child process loads torch again, which takes seconds.
PROCESS = pytest.param("process", marks=pytest.mark.slow)


@pytest.fixture(params=["native", "hf", PROCESS, "http", VLLM])
def engine(request):
    return request.getfixturevalue(FIXTURES.get(request.param, request.param))


@pytest.fixture(params=["hf", PROCESS, "http"])
def ours(request):
    return request.getfixturevalue(FIXTURES.get(request.param, request.param))


def priced(host, requests, done, temperature=1.0) -> list[float]:
    """The trainer's log-probs of what an engine sampled."""
    rows = [
        Trajectory(str(i), r.prompt, c.tokens, i, j)
        for i, (r, g) in enumerate(zip(requests, done, strict=True))
        for j, c in enumerate(g)
    ]
    host.policy.config.rollout.temperature = temperature
    try:
        return host.policy.logprobs(Batch.of(rows))["logprobs"].tolist()
    finally:
        host.policy.config.rollout.temperature = 1.0


# An environment that answers each turn with the number of its characters.
COUNTING = """
class Counting:
    def reset(self, problem):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return str(len(action)), 1.0, self.turns == 3
"""


def play(engine, prompts, folder) -> list:
    """Episodes of three turns, two problems with two samples each; a turn ends with a digit."""
    (folder / "counting.py").write_text(COUNTING)
    settings = EnvironmentConfig(f"{folder / 'counting.py'}:Counting", workers=0)
    turns = Turns(Environments(settings, RolloutConfig()), prompts, 4)
    problems = [Problem(text, ({"role": "user", "content": text},), "") for text in ("1+2", "34")]
    requests = [Request([1], [11, 12]), Request([1], [21, 22])]
    try:
        done = run_turns(engine, requests, problems, Sampling(1.0, 24, stop=tuple("0123")), turns)
    finally:
        turns.close()
    return [one for group in done for one in group]


@pytest.mark.slow
def test_episodes_have_exact_masks_and_logprobs(engine, host, prompts, tmp_path):
    """What the environment said is masked; the trainer gives the rest the engine's log-probs."""
    done = play(engine, prompts, tmp_path)
    assert max(one.turns for one in done) > 1
    for one in done:
        assert len(one.tokens) == len(one.logprobs) == len(one.policy_mask)
        request = Request(one.episode.prompt, [0])
        (logprobs,) = [priced(host, [request], [[one]])]
        for own, sampled, trained in zip(one.policy_mask, one.logprobs, logprobs, strict=True):
            assert abs(sampled - trained) < 1e-3 if own else sampled == 0.0


@pytest.mark.slow
def test_the_same_seeds_give_the_same_episodes_everywhere(ours, native, prompts, tmp_path):
    assert same_completions([play(ours, prompts, tmp_path)], [play(native, prompts, tmp_path)])


def test_an_episode_has_no_logprobs_if_the_server_gives_none(native, prompts, tmp_path):
    """Never those of some turns only, which would be at the wrong tokens."""
    with serve(engine=native, prompts=prompts, gives_ids=False) as served:
        for one in play(HttpEngine(Address.parse(served.address), prompts, 60), prompts, tmp_path):
            assert one.turns > 1 and one.logprobs == [] and False in one.policy_mask


@pytest.mark.slow
def test_completions_come_in_the_order_of_requests_and_seeds(engine):
    done = engine.generate(REQUESTS, Sampling(1.0, 8))
    assert [len(group) for group in done] == [3, 1, 2, 0]
    assert len({tuple(c.tokens) for c in done[0]}) > 1, "each seed has a continuation of its own"


@pytest.mark.slow
def test_the_same_random_numbers_give_the_same_tokens_everywhere(ours, native):
    for sampling in (
        Sampling(1.0, 8),
        Sampling(0.7, 8),
        Sampling(0.0, 8),
        Sampling(1.0, 8, top_p=0.6, top_k=4),
    ):
        assert same_completions(
            ours.generate(REQUESTS, sampling), native.generate(REQUESTS, sampling)
        )


def test_the_same_seeds_give_the_same_and_neighbors_do_not_matter(engine):
    together = engine.generate(REQUESTS, Sampling(1.0, 8))
    assert same_completions(engine.generate(REQUESTS[2:3], Sampling(1.0, 8)), together[2:3])
    assert same_completions(engine.generate(REQUESTS, Sampling(1.0, 8)), together)


def test_limits_hold_and_the_finish_says_why(engine):
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, Sampling(1.0, 8)), strict=True):
        limit = min(8, request.max_new_tokens or 8)
        for done in group:
            assert 1 <= len(done.tokens) <= limit
            assert (done.finish == "stop") == (done.tokens[-1] == END) and (
                done.finish == "stop" or len(done.tokens) == limit
            )


def test_rows_end_at_the_end_token(engine):
    """Many rows, so that some do end early, and none goes on after its end."""
    done = engine.generate([Request([1, 2, 3], list(range(24)))], Sampling(1.5, 12))[0]
    assert {c.finish for c in done} == {"stop", "length"} and all(
        END not in c.tokens[:-1] for c in done
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_sampled_tokens_at_the_sampling_temperature(
    engine, host, temperature
):
    done = engine.generate(REQUESTS, Sampling(temperature, 8))
    assert all(len(c.logprobs) == len(c.tokens) for g in done for c in g)
    assert [p for g in done for c in g for p in c.logprobs] == pytest.approx(
        priced(host, REQUESTS, done, temperature), abs=2e-4
    )


@pytest.mark.slow
def test_tokens_come_as_often_as_the_model_says(engine, host):
    """The frequencies of 400 first tokens are within five deviations of the probabilities."""
    first = engine.generate([Request([1, 2, 3], list(range(400)))], Sampling(1.0, 1))[0]
    seen = torch.bincount(torch.tensor([c.tokens[0] for c in first]), minlength=18) / 400
    rows = Batch.of([Trajectory(str(t), [1, 2, 3], [t]) for t in range(18)])
    expected = host.policy.logprobs(rows)["logprobs"].exp()
    assert (
        float((seen - expected).abs().sub(5 * (expected * (1 - expected) / 400).sqrt()).max())
        <= 0.001
    )


def test_greedy_ignores_the_seed(engine, native):
    request = [Request([1, 2, 3], [1, 2])]
    first = engine.generate(request, Sampling(0.0, 6))[0]
    assert (
        first[0].tokens
        == first[1].tokens
        == native.generate(request, Sampling(0.0, 6))[0][0].tokens
    )


def test_nothing_asked_nothing_said(engine):
    assert engine.generate([], Sampling()) == []
    assert engine.generate([Request([1], [])], Sampling(1.0, 4)) == [[]]


def test_what_does_not_fit_is_a_run_error(engine):
    with pytest.raises(RunError):
        engine.generate([Request([1] * 600, [0])], Sampling(1.0, 8))


# ---- servers


def test_a_server_gets_one_call_a_seed_and_never_more_than_allowed_at_once(native, prompts):
    with serve(engine=native, prompts=prompts) as served:
        engine = HttpEngine(Address.parse(served.address), prompts, 60, concurrency=3)
        engine.generate([Request([1, 2], list(range(12)))], Sampling(1.0, 2))
        assert (
            sorted(body["seed"] for body in served.asked) == list(range(12))
            and 1 < served.busiest <= 3
        )
        assert all(
            body["n"] == 1 and body["model"] == MODEL and body["prompt"] == [1, 2]
            for body in served.asked
        )
        assert engine.max_context == 512 and not engine.shares_weights


def test_a_server_that_refuses_ids_gets_text_and_is_not_asked_twice_again(native, prompts):
    greedy = Sampling(0.0, 5)
    with serve(engine=native, prompts=prompts, takes_ids=False, gives_ids=False) as served:
        engine = HttpEngine(Address.parse(served.address), prompts, 60, concurrency=1)
        done = engine.generate(REQUESTS[:2], greedy)
        truth = native.generate(REQUESTS[:2], greedy)
        assert [[c.tokens for c in g] for g in done] == [[c.tokens for c in g] for g in truth]
        assert all(c.logprobs == [] for g in done for c in g)
        assert [isinstance(body["prompt"], str) for body in served.asked] == [
            False,
            True,
            True,
            True,
            True,
        ]


def test_a_server_that_is_away_for_a_moment_is_asked_again(native, prompts, monkeypatch):
    monkeypatch.setattr(client, "PAUSES_S", (0.01,))
    moods = {
        0: (503, "busy"),
        1: (429, {"error": {"message": "slow down"}}),
        2: (200, b"no json"),
        3: (0, None),
    }
    with serve(engine=native, prompts=prompts, mood=lambda n, body: moods.get(n)) as served:
        engine = HttpEngine(Address.parse(served.address), prompts, 60, concurrency=1)
        assert engine.generate(REQUESTS[1:2], Sampling(1.0, 4)) == native.generate(
            REQUESTS[1:2], Sampling(1.0, 4)
        )
        assert len(served.asked) == 5


@pytest.mark.slow
def test_waiting_ends_and_names_the_address_and_the_trouble(native, prompts, monkeypatch):
    monkeypatch.setattr(client, "PAUSES_S", (0.05,))
    with serve(
        engine=native,
        prompts=prompts,
        mood=lambda n, body: (503, {"error": {"message": "loading"}}),
    ) as served:
        engine = HttpEngine(Address.parse(served.address), prompts, wait_s=0.5)
        with pytest.raises(
            RunError,
            match=rf"POST {served.url}/completions .*(status 503: loading|\w+Timeout: )",
        ):
            engine.generate(REQUESTS, Sampling())


def test_a_silent_server_is_not_waited_for_longer_than_allowed(native, prompts):
    released = threading.Event()  # the server answers only after the client has given up

    def silent(number, body):
        released.wait(60)

    with serve(engine=native, prompts=prompts, mood=silent) as served:
        engine = HttpEngine(Address.parse(served.address), prompts, wait_s=0.4)
        with pytest.raises(RunError, match="timed out"):
            engine.generate(REQUESTS[1:2], Sampling())
        released.set()


def test_refused_request_is_reported_and_not_repeated(native, prompts):
    with serve(
        engine=native, prompts=prompts, mood=lambda n, body: (401, {"error": {"message": "no key"}})
    ) as served:
        with pytest.raises(RunError, match="refused a completion of model tiny with 401: no key"):
            HttpEngine(Address.parse(served.address), prompts, 60, concurrency=1).generate(
                REQUESTS, Sampling()
            )
        assert len(served.asked) == 1, "those that had not begun are left"


def test_nobody_there_and_no_such_model_are_the_users_to_mend(native, prompts, monkeypatch):
    monkeypatch.setattr(http_client, "START_S", 0.3)
    with pytest.raises(
        ConfigError,
        match=r"http://127\.0\.0\.1:9/v1 did not answer GET .*Connection.*; start the server there",
    ):
        HttpEngine(Address.parse("http://127.0.0.1:9/v1#m"), prompts)
    with (
        serve(engine=native, prompts=prompts) as served,
        pytest.raises(ConfigError, match=r"has no model tinny; did you mean tiny\?"),
    ):
        HttpEngine(Address.parse(f"{served.url}#tinny"), prompts)
    for wrong in ("http://host:1/v1", "ftp://host#m", "http://#m", "http://host:port/v1#m"):
        with pytest.raises(ConfigError, match="write it as http://host:8000/v1#model"):
            Address.parse(wrong)


def test_weights_cannot_be_published_to_a_server(native, prompts):
    with (
        serve(engine=native, prompts=prompts) as served,
        pytest.raises(RunError, match="cannot take new weights"),
    ):
        HttpEngine(Address.parse(served.address), prompts).publish({})


@pytest.mark.slow
def test_chat_answers_in_order_with_the_key_and_refusals_are_failures(monkeypatch):
    monkeypatch.setenv("POSTGRAD_API_KEY", "secret")

    def mood(number, body):
        return (
            (400, {"error": {"message": "too long"}})
            if body["messages"][0]["content"] == "b"
            else None
        )

    with serve(chat=lambda text: text * 2, mood=mood) as served:
        said = HttpChat(Address.parse(served.address), 60, 4).reply(
            [[{"role": "user", "content": c}] for c in "abc"], Sampling(0.0, 9), [1, 2, 3]
        )
        assert (
            said[0] == "aa"
            and said[2] == "cc"
            and isinstance(said[1], Failure)
            and "400: too long" in said[1].reason
        )
        assert {body["key"] for body in served.asked} == {"Bearer secret"} and {
            body["max_tokens"] for body in served.asked
        } == {9}
