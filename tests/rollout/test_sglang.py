"""rollout.engine=sglang against a stand-in for the server.

SGLang's wheel needs CUDA libraries, so no server runs here. The stand-in has the routes, fields and
answers of the source of SGLang 0.5.23: srt/entrypoints/http_server.py, srt/managers/io_struct.py,
srt/managers/tokenizer_manager.py and srt/sampling/sampling_params.py.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from refused import refused
from safetensors.torch import load_file
from tiny_runs import END, config_of, same_completions

from postgrad.cluster.engines import engine_config, load_engine
from postgrad.cluster.host import build_host
from postgrad.errors import RunError
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http_client import Address
from postgrad.rollout.sglang import SglangEngine, sampling_params

REQUESTS = [Request([1, 2, 3], [1, 2]), Request([4], [3], 3)]
# The fields of SGLang's SamplingParams that a caller may set and that this engine uses.
KNOWN_PARAMS = {
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "sampling_seed",
}


class StandIn:
    """Answers as SGLang does, from an engine of this process."""

    def __init__(self, engine, finish=None, gives_mask=True):
        self.engine = engine
        self.finish = finish
        self.gives_mask = gives_mask
        self.asked = []
        self.lock = threading.Lock()

    def generate(self, body):
        params = body["sampling_params"]
        assert set(params) <= KNOWN_PARAMS
        if params["top_k"] != -1 and params["top_k"] < 1:
            return 400, {"error": {"message": "top_k must be -1 (disable) or at least 1"}}
        sampling = Sampling(
            params["temperature"],
            params["max_new_tokens"],
            params["top_p"],
            max(0, params["top_k"]),
            params["min_p"],
            tuple(params.get("stop", ())),
            record_kept=body.get("return_sampling_mask", False),
        )
        with self.lock:
            request = Request(body["input_ids"], [params["sampling_seed"]])
            done = self.engine.generate([request], sampling)[0][0]
        pairs = [[p, t, None] for p, t in zip(done.logprobs, done.tokens, strict=True)]
        info = {"finish_reason": self.finish or {"type": done.finish}}
        if body["return_logprob"]:
            info["output_token_logprobs"] = pairs
        if done.kept_ids is not None and self.gives_mask:
            info["output_token_sampling_mask"] = done.kept_ids
            info["output_token_sampling_logprobs"] = done.logprobs
        return 200, {"text": "", "output_ids": done.tokens[:-1], "meta_info": info}

    def update(self, body):
        if "model_path" not in body:
            return 422, {"detail": [{"msg": "Field required"}]}
        with self.lock:
            self.engine.publish(load_file(f"{body['model_path']}/model.safetensors"))
        return 200, {"success": True, "message": "", "num_paused_requests": 0}


@contextmanager
def serve(stand_in):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): ...

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if self.path == "/model_info":
                self.reply(200, {"model_path": "served", "is_generation": True})
            else:
                self.reply(404, {"detail": "Not Found"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.asked.append((self.path, body))
            calls = {"/generate": stand_in.generate, "/update_weights_from_disk": stand_in.update}
            if self.path in calls:
                self.reply(*calls[self.path](body))
            else:
                self.reply(404, {"detail": "Not Found"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Address.parse(f"http://127.0.0.1:{server.server_address[1]}/v1#tiny")
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def host(tiny):
    return build_host(config_of("grpo", tiny))


@pytest.fixture(scope="module")
def apart(tiny):
    """The server's own model."""
    return load_engine(engine_config(config_of("grpo", tiny))).engine


def test_sglangs_own_names():
    request = Request([1], [5], 7)
    params = sampling_params(request, 2**40 + 5, Sampling(0.6, 20, stop=("x",)), [9])
    assert set(params) <= KNOWN_PARAMS
    assert params["max_new_tokens"] == 7 and params["sampling_seed"] == 5
    assert params["top_k"] == -1, "0 is refused by SGLang"
    assert params["stop_token_ids"] == [9] and params["ignore_eos"] and params["no_stop_trim"]
    assert params["stop"] == ["x"] and params["repetition_penalty"] == 1.0


def test_the_server_samples_from_what_was_published(host, apart, prompts, tmp_path):
    stand_in = StandIn(apart)
    with serve(stand_in) as address:
        engine = SglangEngine(
            address, prompts, 30, stop_ids=[END], weights_folder=tmp_path / "weights"
        )
        weights = host.policy.weights()
        turned = {name: -w if "layers.1" in name else w for name, w in weights.items()}
        for published in (turned, weights):
            engine.publish(published)
            done = engine.generate(REQUESTS, Sampling(1.0, 6))
            mine = host.engine.generate(REQUESTS, Sampling(1.0, 6))
            assert same_completions(done, mine) == (published is weights)
        assert not list((tmp_path / "weights").iterdir())
    paths = {path for path, _ in stand_in.asked}
    assert paths == {"/generate", "/update_weights_from_disk"}
    assert all(body["return_logprob"] for path, body in stand_in.asked if path == "/generate")


def test_what_the_server_kept_comes_back(host, apart, prompts):
    sampling = Sampling(1.2, 6, top_k=3, record_kept=True)
    apart.publish(host.policy.weights())
    with serve(StandIn(apart)) as address:
        done = SglangEngine(address, prompts, 30, stop_ids=[END]).generate(REQUESTS, sampling)
    mine = host.engine.generate(REQUESTS, sampling)
    assert same_completions(done, mine)
    kept = [[one.kept_ids for group in groups for one in group] for groups in (done, mine)]
    assert kept[0] == kept[1]
    assert all(len(ids) == 3 for row in kept[0] for ids in row or [[]])


def test_answers_without_the_kept_ids_or_an_end_are_refused(apart, prompts):
    with serve(StandIn(apart, gives_mask=False)) as address:
        engine = SglangEngine(address, prompts, 30, stop_ids=[END])
        with pytest.raises(RunError, match="return_sampling_mask"):
            engine.generate(REQUESTS, Sampling(1.0, 4, top_k=3, record_kept=True))
    aborted = {"type": "abort", "message": "out of memory", "status_code": 500}
    with serve(StandIn(apart, finish=aborted)) as address:
        engine = SglangEngine(address, prompts, 30, stop_ids=[END])
        with pytest.raises(RunError, match="out of memory"):
            engine.generate(REQUESTS, Sampling(1.0, 4))


def test_another_server_is_refused_at_the_start(prompts):
    from openai_server import serve as serve_openai

    with serve_openai() as served, refused("unreachable", "rollout.url"):
        SglangEngine(Address.parse(served.address), prompts, 30, stop_ids=[END])
