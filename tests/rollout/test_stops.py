"""Stop strings: a response ends with the token that completes one, in every engine."""

import json

import pytest
from interpreted import run_interpreted
from openai_server import serve
from refused import refused
from serve_process import live
from tiny_runs import END, config_of, metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.cluster.backends import open_models
from postgrad.cluster.host import build_host
from postgrad.errors import RunError
from postgrad.evaluation.settings import read_settings
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.training.resolve import resolve

REQUESTS = [Request([1, 10, 2, 15], list(range(12))), Request([7, 15], [3, 4], 6)]
FREE = Sampling(1.0, 12)


@pytest.fixture(scope="module")
def native(tiny):
    return build_host(config_of("grpo", tiny)).engine


@pytest.fixture(scope="module")
def stops(native, prompts):
    """Two strings that some of the free answers hold, one of a token and one of two."""
    texts = [prompts.decode(c.tokens) for group in native.generate(REQUESTS, FREE) for c in group]
    pair = next(t[i : i + 2] for t in texts for i in range(2, len(t) - 2))
    return (pair, next(c for t in texts for c in t[3:4] if c not in pair))


def cut(free, prompts, stops):
    """Reference: the shortest prefix of an unrestricted answer that contains a stop string."""
    out = []
    for done in free:
        ends = (
            n
            for n in range(1, len(done.tokens) + 1)
            if any(s in prompts.decode_raw(done.tokens[:n]) for s in stops)
        )
        end = next(ends, 0)
        out.append((done.tokens[:end], "stop") if end else (done.tokens, done.finish))
    return out


def expected(native, prompts, stops):
    return [cut(group, prompts, stops) for group in native.generate(REQUESTS, FREE)]


def tokens_and_finish(groups):
    return [[(c.tokens, c.finish) for c in group] for group in groups]


def test_the_native_engine_ends_with_the_token_that_completes_a_string(native, prompts, stops):
    done = native.generate(REQUESTS, Sampling(1.0, 12, stop=stops))
    assert tokens_and_finish(done) == expected(native, prompts, stops)
    ends = [c for group in done for c in group if c.finish == "stop" and c.tokens[-1] != END]
    assert len(ends) > 2 and all(len(c.logprobs) == len(c.tokens) for group in done for c in group)
    assert all(prompts.decode(c.tokens).endswith(stops) for c in ends)
    native.max_rows, before = 3, native.max_rows
    try:
        assert tokens_and_finish(
            native.generate(REQUESTS, Sampling(1.0, 12, stop=stops))
        ) == tokens_and_finish(done), "whoever decodes beside it"
    finally:
        native.max_rows = before


def test_transformers_generate_is_cut_there(tiny, prompts, native, stops):
    engine = build_host(config_of("grpo", tiny, "rollout.engine=hf")).engine
    assert tokens_and_finish(engine.generate(REQUESTS, Sampling(1.0, 12, stop=stops))) == expected(
        native, prompts, stops
    )


@pytest.mark.slow
def test_a_child_process_and_servers_end_at_the_same_token(tiny, native, prompts, stops):
    sampling, truth = Sampling(1.0, 12, stop=stops), expected(native, prompts, stops)
    with open_models(config_of("grpo", tiny, "cluster.backend=process")) as placed:
        assert tokens_and_finish(placed.engine.generate(REQUESTS, sampling)) == truth
    with live(tiny) as server:
        assert (
            tokens_and_finish(
                HttpEngine(Address.parse(f"{server.url}#tiny"), prompts, 60).generate(
                    REQUESTS, sampling
                )
            )
            == truth
        )
    with serve(engine=native, prompts=prompts) as served:
        HttpEngine(Address.parse(served.address), prompts, 60).generate(REQUESTS[1:], sampling)
        assert all(
            body["stop"] == list(stops) and body["include_stop_str_in_output"] is True
            for body in served.asked
        )
    with (
        serve(engine=native, prompts=prompts, takes_ids=False) as served,
        pytest.raises(RunError, match="stop strings"),
    ):
        HttpEngine(Address.parse(served.address), prompts, 60, concurrency=1).generate(
            REQUESTS[1:], sampling
        )


PAGED = """
import json, sys, torch
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.model.load.load import load
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native import store_pages

stops = tuple(json.loads(sys.argv[2]))
store_pages.STEPS_PER_SYNC = 4  # some syncs happen in the middle of a stop string
loaded = load(ModelConfig(path=sys.argv[1], dtype="float32"), torch.device("cpu"), 0)
engine = NativeEngine(loaded, RolloutConfig(max_rows=16))
asked = [Request([1, 10, 2, 15], list(range(4))), Request([7, 15], [3, 4], 6)]
sampling = Sampling(1.0, 9, stop=stops)
plain = engine.generate(asked, sampling)
from postgrad.model.kernels.install import install_kernels
install_kernels(loaded.model)
engine.decoder = Decoder(loaded.model, engine.stop_ids)
engine.max_rows, engine.cache_gib = 8, 30 * engine.decoder.page_bytes() / 2**30
done = engine.generate(asked, sampling)
ended = 0
for a, b in zip(plain, done, strict=True):
    for x, y in zip(a, b, strict=True):
        assert x.tokens == y.tokens and x.finish == y.finish, (x, y)
        assert max(abs(p - q) for p, q in zip(x.logprobs, y.logprobs, strict=True)) < 1e-4, (x, y)
        ended += x.finish == "stop" and x.tokens[-1] != 17
print("same", ended)
"""


@pytest.mark.slow
def test_the_paged_engine_ends_at_the_same_token(tiny, stops):
    same, num_ended = run_interpreted(PAGED, tiny, json.dumps(stops)).split()
    assert same and int(num_ended) > 0


# ---- the setting


@pytest.mark.slow
def test_a_style_brings_its_own_strings_unless_others_are_given(tiny):
    def resolved(*overrides):
        return resolve(config_of("grpo", tiny, *overrides)).rollout.stop

    assert resolved() == [] and resolved("data.prompt_style=r1_zero") == ["</answer>"]
    assert resolved("data.prompt_style=zero_shot") == ["# Query:"]
    assert resolved("data.prompt_style=r1_zero", "rollout.stop=[]") == [] and resolved(
        "rollout.stop=[a,b]"
    ) == ["a", "b"]
    with refused("wrong_value", "rollout.stop"):
        resolved("rollout.stop=['']")
    run = {"rollout": {"stop": ["x"]}, "data": {"prompt_style": "own"}}
    assert read_settings("m", ["data=f"], run).rollout.stop == ["x"], (
        "an evaluation of a run answers as the run did"
    )
    assert read_settings("m", ["data=f", "stop=[y]"], run).rollout.stop == ["y"]


@pytest.mark.slow
def test_a_run_and_its_evaluation_stop_there(tiny, tmp_path, stops):
    stop = stops[1]
    verifier = tmp_path / "mine.py"
    verifier.write_text(
        f"def ends(response, problem):\n    return float(response.endswith({stop!r}))\n"
    )
    overrides = overrides_of(
        tiny,
        "training.steps=1",
        "training.problems_per_step=4",
        "rollout.max_response_tokens=12",
        f"runs={tmp_path}",
    )
    more = [
        f"rollout.stop=['{stop}']",
        f"reward.verifier={verifier}:ends",
        "reward.workers=1",
        "training.max_flat_steps=5",
    ]
    assert main(["train", "grpo", *overrides, *more]) == 0
    assert metrics_of(tmp_path / "test")[0]["reward/mean"] > 0.3, (
        "most responses of an untrained model meet it"
    )
    out = tmp_path / "out"
    assert (
        main(
            [
                "eval",
                str(tmp_path / "test"),
                "data=arithmetic:1",
                "n=4",
                "limit=4",
                f"out={out}",
                "reward.workers=1",
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in next(out.glob("*.jsonl")).read_text().splitlines()]
    assert all(stop not in row["response"][:-1] for row in rows) and any(
        row["response"].endswith(stop) for row in rows
    )
    assert {row["finish"] for row in rows if row["response"].endswith(stop)} == {"stop"}
