"""`postgrad serve --train`: checkpoints, limits, errors, and the wire format."""

import shutil
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from serve_process import command
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from tinker import types
from tinker.proto import request_conv, response_conv
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker_server import KEY, datum, supervised, train_step, training_server
from tiny_runs import END

from postgrad.cli import serve
from postgrad.errors import ConfigError
from postgrad.serving.tinker import app, messages, protobuf
from postgrad.serving.tinker.checkpoints import Checkpoint, Checkpoints
from postgrad.serving.tinker.futures import Results
from postgrad.web import HttpError

PROMPT = [1, 10, 2, 15]  # "1+2="
DATA = [supervised(PROMPT, [3, END])]
TOKENS = types.ModelInput.from_ints([*PROMPT, 3])


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    with training_server(tiny, tmp_path_factory.mktemp("tinker") / "saved") as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as service:
        yield service.create_lora_training_client("tiny", rank=2, seed=0)


# ---- checkpoints


@pytest.mark.slow
def test_checkpoints_survive_a_restart(tiny, tmp_path):
    """Training goes on bit for bit, and samplers give the same log-probs."""
    with training_server(tiny, tmp_path / "saved") as first, first.connect() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=0)
        for _ in range(3):
            train_step(client, DATA)
        state = client.save_state("three", user_metadata={"note": "x"}).result(60).path
        weights = client.save_weights_for_sampler("three").result(60).path
        sampler = service.create_sampling_client(model_path=weights)
        scored = sampler.compute_logprobs(TOKENS).result(60)
        expected = [train_step(client, DATA) for _ in range(3)]
    with training_server(tiny, tmp_path / "saved") as second, second.connect() as service:
        resumed = service.create_training_client_from_state_with_optimizer(state)
        assert resumed.get_info().lora_rank == 2
        assert [train_step(resumed, DATA) for _ in range(3)] == expected
        anew = service.create_training_client_from_state(state)
        losses = [train_step(anew, DATA) for _ in range(3)]
        assert losses[0] == expected[0]
        assert losses != expected  # AdamW has started anew
        sampler = service.create_sampling_client(model_path=weights)
        assert sampler.compute_logprobs(TOKENS).result(60) == scored
        run_id = client.model_id
        saved = second.rest().list_checkpoints(run_id).result().checkpoints
        assert [one.checkpoint_type for one in saved] == ["training", "sampler"]
        assert saved[0].user_metadata == {"note": "x"}
        with pytest.raises(tinker.NotFoundError, match="create_training_client_from_state"):
            client_of(service, run_id).forward(DATA, "cross_entropy").result(60)


def client_of(service, model_id):
    """A training client that only remembers its id."""
    return tinker.TrainingClient(service.holder, model_seq_id=0, model_id=model_id)


@pytest.mark.slow
def test_names_of_checkpoints(client, server):
    first = client.save_state("one").result(60).path
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        client.save_state("one").result(60)
    train_step(client, DATA)
    assert client.save_state("one", overwrite=True).result(60).path == first
    for name in ("../one", "a/b", ".hidden", ""):
        with pytest.raises(tinker.BadRequestError, match="name"):
            client.save_state(name).result(60)
    for path in ("tinker://nobody/weights/one", first + "x", "tinker://a/b/c", "/etc/passwd"):
        with pytest.raises(tinker.APIStatusError):
            client._load_state_impl(path, optimizer=True, weights_access_token=None).result(60)
    rest = server.rest()
    rest.set_checkpoint_ttl_from_tinker_path(first, 7200).result()
    (entry,) = [
        one for one in rest.list_checkpoints(client.model_id).result().checkpoints
        if one.tinker_path == first
    ]  # fmt: skip
    assert entry.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(first).result()
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    assert first not in [one.tinker_path for one in left]
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(first).result()


def test_expired_checkpoints_are_gone(client, server, monkeypatch):
    path = client.save_state("short", ttl_seconds=3600).result(60).path
    from postgrad.serving.tinker import checkpoints

    later = checkpoints._now() + checkpoints.timedelta(hours=2)
    monkeypatch.setattr(checkpoints, "_now", lambda: later)
    with pytest.raises(HttpError):
        server.service.checkpoints.find(path)
    assert server.service.checkpoints.list(client.model_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_kill_while_files_are_removed_leaves_no_part_of_a_checkpoint(
    tmp_path, monkeypatch, overwrite
):
    checkpoints = Checkpoints(tmp_path)
    rmtree = shutil.rmtree

    def save(text: str) -> Checkpoint:
        return checkpoints.save(
            "run", "weights", "one", lambda folder: fill(folder, text), overwrite=True
        )

    def fill(folder: Path, text: str) -> None:
        (folder / "adapter").write_text(text)

    def remove_and_stop(path: Path, ignore_errors: bool = False) -> None:
        if (path / "checkpoint.json").exists():
            (path / "checkpoint.json").unlink()
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=ignore_errors)

    saved = save("old")
    monkeypatch.setattr(shutil, "rmtree", remove_and_stop)
    with pytest.raises(KeyboardInterrupt):
        save("new") if overwrite else checkpoints.delete(saved)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert len(checkpoints.list("run")) == int(overwrite)
    if overwrite:
        assert (checkpoints.find(saved.path).folder / "adapter").read_text() == "new"


def test_downloads_are_peft_adapters(client, server, tiny, tmp_path):
    peft = pytest.importorskip("peft")
    from tiny_runs import stock_model, stock_row

    train_step(client, DATA)
    path = client.save_weights_external("out").result(60).path
    urls = server.rest().get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for file, url in urls.items():
        (tmp_path / file).write_bytes(httpx.get(url).raise_for_status().content)
        forged = url.replace("adapter_", "..%2F..%2Fadapter_")
        assert httpx.get(forged).status_code in (403, 404)
    stock = peft.PeftModel.from_pretrained(stock_model(tiny, torch.float32), tmp_path)
    expected = stock_row(stock, PROMPT[:1], [*PROMPT[1:], 3])[0].detach().numpy()
    result = client.forward([datum([*PROMPT, 3])], "cross_entropy").result(60)
    returned = result.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(returned, expected, atol=2e-5)


def test_listings(client, server):
    rest = server.rest()
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora) == ("tiny", 2, True)
    assert client.model_id in [
        one.training_run_id for one in rest.list_training_runs().result().training_runs
    ]
    session_id = client.model_id.split(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [client.model_id]


def test_a_checkpoint_of_another_model_is_refused(client, server):
    path = client.save_state("mine").result(60).path
    server.service.name = "other"
    try:
        with pytest.raises(HttpError, match="tiny"):
            server.service.find_checkpoint(path)
    finally:
        server.service.name = "tiny"


# ---- limits and errors


@pytest.mark.slow
def test_a_server_for_other_machines_has_any_name_for_clients_with_the_key():
    client = TestClient(app.KeyMiddleware(JSONResponse({}), "0.0.0.0", KEY))
    client.headers["Host"] = "gpu1.cluster.example"
    for headers, status in (({"X-Api-Key": KEY}, 200), ({"X-Api-Key": "wrong"}, 403), ({}, 403)):
        assert client.get("/api/v1/sessions", headers=headers).status_code == status


def test_wrong_token_is_refused(tiny, tmp_path):
    with training_server(tiny, tmp_path, token="tml-right-key") as server:
        with server.connect("tml-right-key") as service:
            assert service.get_server_capabilities().supported_models
        wrong = tinker.ServiceClient(base_url=server.url, api_key="tml-wrong-key")
        with pytest.raises(tinker.AuthenticationError):
            wrong.get_server_capabilities()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/api/v1/sessions").status_code == 401
        foreign = {"Host": "evil.example", "X-API-Key": "tml-right-key"}
        assert httpx.get(f"{server.url}/api/v1/sessions", headers=foreign).status_code == 403


def test_unknown_models_and_clients_are_refused(server):
    with server.connect() as service:
        with pytest.raises(tinker.NotFoundError, match="tiny"):
            service.create_lora_training_client("tinny")
        with pytest.raises(tinker.NotFoundError):
            service.create_sampling_client(base_model="tinny")
        with pytest.raises(tinker.NotFoundError):
            client_of(service, "session-x:train:0").forward(DATA, "cross_entropy").result(60)
        with pytest.raises(tinker.UnprocessableEntityError, match="rank"):
            service.create_lora_training_client("tiny", rank=10**6)


@pytest.mark.slow
def test_large_requests_are_refused(client, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY", 1 << 20)
    large = datum([1] * 200_000)
    with pytest.raises(tinker.APIStatusError, match="413"):
        client.forward_backward([large], "cross_entropy").result(60)
    train_step(client, DATA)  # the client goes on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "loss", "options", "match"),
    [
        (datum([1, 2]), "ppo", None, "logprobs"),
        (datum([1, 2], weights=[1.0]), "stable_reinforce", None, "known"),
        (datum([1, 2], weights=[1.0]), "cross_entropy", {"beta": 1.0}, "beta"),
        (datum([1, 2], weights=[1.0, 1.0]), "cross_entropy", None, "weights"),
        (datum([1, 2], weights=[float("nan")]), "cross_entropy", None, "finite"),
        (datum([1, 999], weights=[1.0]), "cross_entropy", None, "target_tokens"),
        (datum([999, 1], weights=[1.0]), "cross_entropy", None, "model_input"),
        (datum([1] * 600), "cross_entropy", None, "512"),
    ],
)
def test_wrong_data_is_a_user_error(client, given, loss, options, match):
    with pytest.raises(tinker.RequestFailedError, match=match) as caught:
        client.forward_backward([given], loss, options).result(60)
    assert caught.value.category == types.RequestErrorCategory.User


def test_steps_without_gradient_and_wrong_samples(client, server):
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        client.optim_step(types.AdamParams()).result(60)
    sampler = client.save_weights_and_get_sampling_client()
    for prompt, params in (
        ([], {}),
        ([999], {}),
        (PROMPT, {"max_tokens": 10_000}),
        (PROMPT, {"temperature": -1.0}),
        (PROMPT, {"top_p": 0.0}),
    ):
        given = types.SamplingParams(**{"max_tokens": 4} | params)
        with pytest.raises(tinker.APIStatusError):
            sampler.sample(types.ModelInput.from_ints(prompt), 1, given).result(60)


@pytest.mark.slow
def test_number_of_clients_and_idle_sessions(tiny, tmp_path):
    with training_server(tiny, tmp_path, clients=1, samplers=2, idle_s=60.0) as server:
        with server.connect() as service:
            client = service.create_lora_training_client("tiny", rank=2)
            with pytest.raises(tinker.PermissionDeniedError, match="--clients"):
                service.create_lora_training_client("tiny", rank=2)
            samplers = [client.save_weights_and_get_sampling_client() for _ in range(3)]
            with pytest.raises(tinker.NotFoundError, match="sampler"):
                samplers[0].compute_logprobs(TOKENS).result(60)
            assert samplers[2].compute_logprobs(TOKENS).result(60)
            for session in server.service.sessions.values():
                session.seen_at -= 100  # as if its heartbeats had stopped
            server.service._expired_at = 0.0
            with server.connect() as other:
                other.create_lora_training_client("tiny", rank=2)
                with pytest.raises(tinker.NotFoundError, match="no training client"):
                    client.forward(DATA, "cross_entropy").result(60)
        assert server.service.clients == {}  # ended sessions leave nothing
        assert not server.service.samplers


def test_an_adapter_that_does_not_fit_is_refused(server, monkeypatch):
    from postgrad.serving.tinker import trained_model

    monkeypatch.setattr(trained_model, "memory_bytes", lambda: (1000, 1000))
    with server.connect() as service:
        with pytest.raises(tinker.RequestFailedError, match="lower rank"):
            service.create_lora_training_client("tiny", rank=64)
        assert not server.service.clients


def test_a_pass_that_fails_leaves_no_part_of_a_gradient(client, server, monkeypatch):
    adapter = server.service.clients[client.model_id].adapter()
    forward = adapter.policy.forward
    calls = []

    def fail_later(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(adapter.policy, "forward", fail_later)
    monkeypatch.setattr(adapter.policy.config.training, "token_budget", 8)
    with pytest.raises(tinker.RequestFailedError, match="out of memory") as caught:
        client.forward_backward(DATA * 4, "cross_entropy").result(60)
    assert caught.value.category == types.RequestErrorCategory.Server
    assert not adapter.policy.optimizer.has_gradients()
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        client.optim_step(types.AdamParams()).result(60)
    assert train_step(client, DATA) > 0


@pytest.mark.slow
def test_a_request_that_is_sent_again_is_run_once(client, server):
    train_step(client, DATA)
    body = {
        "model_id": client.model_id,
        "seq_id": 99,
        "adam_params": {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12},
    }
    client.forward_backward(DATA, "cross_entropy").result(60)
    headers = {"X-API-Key": KEY}
    answers = [
        httpx.post(f"{server.url}/api/v1/optim_step", json=body, headers=headers).json()
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    for _ in range(2):
        response = httpx.post(
            f"{server.url}/api/v1/retrieve_future", json=answers[0], headers=headers, timeout=600
        )
        assert "error" not in response.json()
    gone = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": "no"})
    assert gone.status_code == 410


def test_results_that_are_not_there_yet(client, server, monkeypatch):
    """A poll ends with status 408; the client polls again."""
    from postgrad.serving.tinker import futures

    monkeypatch.setattr(futures, "POLL_S", 0.05)
    results, model = server.service.results, server.service.model
    wait, train = results.wait, model.forward_backward
    poll_ended = threading.Event()

    async def wait_and_note(request_id):
        result = await wait(request_id)
        if result is None:
            poll_ended.set()
        return result

    def train_after_a_poll(*arguments):
        assert poll_ended.wait(300)
        return train(*arguments)

    monkeypatch.setattr(results, "wait", wait_and_note)
    monkeypatch.setattr(model, "forward_backward", train_after_a_poll)
    assert train_step(client, DATA) > 0


def test_old_results_are_dropped():
    results = Results(max_bytes=10)
    for number in range(4):
        results.finish(results.add(str(number)), b"12345", "x")
    assert [results.find(str(number)) is not None for number in range(4)] == [False] * 2 + [
        True
    ] * 2
    assert results.num_bytes == 10
    assert results.num_pending == 0


def test_unknown_paths_and_fields_say_so(server):
    post = {"headers": {"X-API-Key": KEY}}
    missing = httpx.post(f"{server.url}/api/v1/copy_weights", json={}, **post)
    assert missing.status_code == 404
    assert "copy_weights" in missing.json()["detail"]
    odd = httpx.post(f"{server.url}/api/v1/create_session", json={"tagz": []}, **post)
    assert odd.status_code == 422
    assert "tagz" in odd.json()["detail"]
    proto = {"X-API-Key": KEY, "Content-Type": "application/x-protobuf"}
    for body in (b"\xff\xff", b"\x1a\x05abc", b"\x0a\x01x"):
        wrong = httpx.post(f"{server.url}/api/v1/forward_backward", content=body, headers=proto)
        assert wrong.status_code in (400, 404)


# ---- the wire format


def test_requests_are_read_as_the_client_writes_them():
    sparse = types.TensorData.from_torch_sparse(torch.tensor([[0, 0, 7, 0, 0, 0]] * 8))
    assert sparse.sparse_crow_indices is not None
    weights = types.TensorData.from_numpy(np.array([[1.5], [-2]], dtype=np.float32))
    chunks = [types.EncodedTextChunk(tokens=[5, 300]), types.EncodedTextChunk(tokens=[7])]
    inputs = {"target_tokens": sparse, "weights": weights}
    given = types.Datum(types.ModelInput(chunks=chunks), inputs)
    message = request_conv.forward_backward_request_to_proto(
        ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=[given, datum([1, 2])], loss_fn="ppo", loss_fn_config={"beta": -0.5}
            ),
            model_id="m:é",
            seq_id=70_000,
        )
    )
    message.forward_only = True
    parsed = messages.parse_forward_backward(message.SerializeToString())
    assert (parsed.model_id, parsed.seq_id, parsed.loss) == ("m:é", 70_000, "ppo")
    assert parsed.options == {"beta": -0.5}
    assert parsed.forward_only
    assert [one.tokens for one in parsed.data] == [[5, 300, 7], [1]]
    first = parsed.data[0].inputs
    assert (first["target_tokens"] == np.array([[0, 0, 7, 0, 0, 0]] * 8)).all()
    assert (first["weights"] == np.array([[1.5], [-2]])).all()


def test_responses_are_written_as_the_client_reads_them():
    outputs = [np.float32([-1, -2.5]), np.float32([-3])]
    body = messages.encode_forward_backward(outputs, {"loss:sum": -1e-300})
    read = response_conv.deserialize_forward_backward_output(body)
    assert read.metrics == {"loss:sum": -1e-300}
    for one, output in zip(read.loss_fn_outputs, outputs, strict=True):
        assert (one["logprobs"].to_numpy() == output).all()
    samples = [
        messages.Sample([1, 300], [-0.5, -1.5], "length"),
        messages.Sample([2], [-1], "stop"),
    ]
    prompt = np.float32([np.nan, -2])
    read = response_conv.deserialize_sample_response(messages.encode_samples(samples, prompt))
    assert [one.tokens for one in read.sequences] == [[1, 300], [2]]
    assert [one.stop_reason for one in read.sequences] == ["length", "stop"]
    assert read.sequences[0].logprobs == [-0.5, -1.5]
    assert read.prompt_logprobs == [None, -2]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_cut_messages_are_refused(cut):
    message = protobuf.encode_bytes(1, "model") + protobuf.encode_bytes(3, b"\x0a\x40" + b"x" * 60)
    with pytest.raises(HttpError):
        messages.parse_forward_backward(message[:-cut])


# ---- the command


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b", "--train"],
        ["a", "--train", "--engine", "vllm"],
        ["a", "--train", "--reload-below", "x"],
        ["a", "--clients", "2"],
    ],
)
def test_wrong_options(arguments):
    with pytest.raises(ConfigError, match="--"):
        serve.run(arguments)


def test_a_token_must_be_one_that_the_client_sends(tmp_path):
    (tmp_path / "token").write_text("long-enough-token")
    with pytest.raises(ConfigError, match="tml-"):
        serve.run(["tiny", "--train", "--token-file", str(tmp_path / "token")])


@pytest.mark.slow
def test_the_command(tiny, tmp_path):
    saved = str(tmp_path / "saved")
    with command(str(tiny), "--train", "--name", "tiny", "--checkpoints", saved) as running:
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{running.port}", api_key=KEY)
        trained = client.create_lora_training_client("tiny", rank=2)
        losses = [train_step(trained, DATA) for _ in range(3)]
        assert losses[2] < losses[0]
        trained.save_state("end").result(60)
        client.close("success").result(30)
    assert list((tmp_path / "saved").glob("*/weights/end/optimizer.safetensors"))
