"""Rollouts from a server that takes new weights: each kind of server, and refused servers."""

import pytest
from openai_server import MODEL, serve
from refused import refused
from safetensors.torch import load_file
from tiny_runs import END, config_of, same_completions

from postgrad.cluster.engines import engine_config, load_engine
from postgrad.cluster.host import build_host
from postgrad.errors import RunError
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import Address

REQUESTS = [Request([1, 2, 3], [1, 2]), Request([4], [3])]
PATH = {
    "/v1/reload": lambda body: body["folder"] if body["model"] == MODEL else "",
    "/update_weights_from_disk": lambda body: body["model_path"],
    "/collective_rpc": lambda body: (
        body["kwargs"]["weights_path"] if body["method"] == "reload_weights" else ""
    ),
}


@pytest.fixture(scope="module")
def host(tiny):
    return build_host(config_of("grpo", tiny))


@pytest.fixture
def apart(tiny):
    """The server's own model."""
    return load_engine(engine_config(config_of("grpo", tiny))).engine


def rollouts(served, prompts, folder):
    address = Address.parse(served.address)
    return HttpEngine(address, prompts, 30, stop_ids=[END], weights_folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATH)
def test_a_server_samples_from_what_was_published(path, host, apart, prompts, tmp_path):
    after = []

    def reload(body):
        apart.publish(load_file(f"{PATH[path](body)}/model.safetensors"))
        return {"success": True, "message": ""}

    calls = {
        path: reload,
        "/reset_prefix_cache": lambda body: after.append("keys") or {"success": True},
        "/reset_encoder_cache": lambda body: after.append("pictures") or b"",
    }
    with serve(engine=apart, prompts=prompts, calls=calls) as served:
        engine = rollouts(served, prompts, tmp_path / "weights")
        assert engine.weights.api.path == path and not engine.shares_weights
        turned = {
            name: -w if "layers.1" in name else w for name, w in host.policy.weights().items()
        }
        for weights in (turned, host.policy.weights()):
            engine.publish(weights)
            done, mine = (e.generate(REQUESTS, Sampling(1.0, 6)) for e in (engine, host.engine))
            assert same_completions(done, mine) == (weights is not turned)
            engine.weights.reads_pictures = True
        dropped = ["keys", "keys", "pictures"] if path == "/collective_rpc" else []
        assert after == dropped, "vLLM's caches are dropped"
        assert not list((tmp_path / "weights").iterdir()), (
            "weights are removed once the server has read them"
        )
        asked = [body for body in served.asked if body["path"] == "/v1/completions"]
        assert all(body["repetition_penalty"] == 1.0 for body in asked)


def test_a_server_that_takes_no_weights_is_refused_at_the_start(apart, prompts, tmp_path):
    with (
        serve(engine=apart, prompts=prompts) as served,
        refused("unsupported", "rollout.url", shows="VLLM_SERVER_DEV_MODE=1"),
    ):
        rollouts(served, prompts, tmp_path)


@pytest.mark.parametrize("what", ["takes_ids", "gives_ids"])
def test_a_server_of_text_is_refused_at_the_start(what, apart, prompts, tmp_path):
    with (
        serve(
            engine=apart,
            prompts=prompts,
            calls={"/v1/reload": lambda body: body["folder"]},
            **{what: False},
        ) as served,
        refused(
            "unsupported",
            "rollout.url",
            shows="with 422.* takes token ids"
            if what == "takes_ids"
            else "gave no token ids with log-probs",
        ),
    ):
        rollouts(served, prompts, tmp_path)


def answering(path, answer):
    """A call that always gives this answer; reload calls require their arguments."""
    return lambda body: answer if path == "/reset_prefix_cache" else PATH[path](body) and answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "overrides"),
    [
        (
            {"/v1/reload": {"success": False, "message": "no such folder"}},
            "weights: no such folder",
        ),
        (
            {"/collective_rpc": {}, "/reset_prefix_cache": {"success": False}},
            "kept keys and values of the old weights",
        ),
        ({"/collective_rpc": {}}, "/reset_prefix_cache refused new weights with 404"),
    ],
)
def test_weights_that_were_not_taken_stop_the_run(
    answers, overrides, apart, prompts, tmp_path, host
):
    calls = {path: answering(path, answer) for path, answer in answers.items()}
    with (
        serve(engine=apart, prompts=prompts, calls=calls) as served,
        pytest.raises(RunError, match=overrides),
    ):
        rollouts(served, prompts, tmp_path).publish(host.policy.weights())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(apart, prompts, tmp_path, host):
    (tmp_path / "file").write_text("")
    with serve(
        engine=apart, prompts=prompts, calls={"/v1/reload": lambda body: body["folder"]}
    ) as served:
        engine = rollouts(served, prompts, tmp_path / "file")
        with pytest.raises(
            RunError, match=r"weights for the server could not be written to .*file"
        ):
            engine.publish(host.policy.weights())


def test_a_server_that_may_not_take_weights_says_so(apart, prompts, tmp_path):
    def forbidden(number, body):
        return (403, {"error": {"message": "start it with --reload-below"}}) if not body else None

    with (
        serve(engine=apart, prompts=prompts, mood=forbidden) as served,
        refused("unreachable", "rollout.url", shows="403"),
    ):
        rollouts(served, prompts, tmp_path)


def test_a_row_that_ends_at_another_token_is_an_error(apart, prompts, tmp_path):
    answer = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [3],
        "logprobs": {"token_logprobs": [-1.0]},
    }
    mood = lambda number, body: (200, {"choices": [answer]}) if "prompt" in body else None  # noqa: E731
    with (
        serve(
            engine=apart,
            prompts=prompts,
            calls={"/v1/reload": lambda body: body["folder"]},
            mood=mood,
        ) as served,
        refused("unsupported", "rollout.url", shows="token 3"),
    ):
        rollouts(served, prompts, tmp_path)
