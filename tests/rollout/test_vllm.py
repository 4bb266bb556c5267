"""Real vLLM, in this process and as a server: weight sync, training, evaluation.

`make test-vllm` runs these tests.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import END, config_of, metrics_of, overrides_of, random_batch, sharpened, toy_run
from vision_models import MROPE, requests_with_pictures, save_vision_model

from postgrad.cli.main import main
from postgrad.cluster.backends import open_models
from postgrad.cluster.host import build_host
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.doctor import machine as doctor
from postgrad.errors import ConfigError
from postgrad.methods.method import Ports
from postgrad.model.load.load import cache_folder, load_tokenizer
from postgrad.model.load.tiny import make_tiny
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.training.driver import train
from postgrad.training.guard import check_engine_gap
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
]
SMALL = (
    *toy_run(steps=3),
    "rollout.max_rows=16",
    "rollout.cache_gib=0.25",
    "optimizer.lr=1e-2",
)
REQUESTS = [Request([1, 2, 3], [1, 2, 3, 4]), Request([4, 15], [5, 6])]
NAME = "small"
SMOLLM2 = cache_folder() / "smollm2-135m-instruct"


def test_the_recorded_architectures_are_those_of_vllm():
    """docs/machines.md says from this list which families vLLM has."""
    from vllm import ModelRegistry

    file = Path(__file__).parents[1] / "model" / "vllm_architectures.txt"
    recorded = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert set(recorded) <= set(ModelRegistry.get_supported_archs())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sharpened(
        make_tiny(tmp_path_factory.mktemp("models") / "wide", seed=0, layers=2, width=128, heads=2)
    )


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """An untied model: vLLM's CPU server keeps the old head of a tied one (vllm._repack_heads)."""
    return sharpened(
        make_tiny(
            tmp_path_factory.mktemp("models") / "untied",
            seed=0,
            layers=2,
            width=128,
            heads=2,
            tied=False,
        )
    )


def varied(folder: Path) -> str:
    """A reward that differs within every group, so that every step is an update."""
    (folder / "mine.py").write_text(
        "def varied(response, problem):\n    return sum(map(ord, response)) % 7 / 7\n"
    )
    return f"reward.verifier={folder / 'mine.py'}:varied"


def gap(policy, engine, requests=REQUESTS, limit=8) -> float:
    """Largest distance of the engine's log-probs from the trainer's, on what the engine samples."""
    rows = [
        Trajectory(
            str(i),
            request.prompt,
            one.tokens,
            i,
            j,
            behavior_logprobs=one.logprobs,
            images=request.images,
        )
        for i, (request, group) in enumerate(
            zip(requests, engine.generate(requests, Sampling(1.0, limit)), strict=True)
        )
        for j, one in enumerate(group)
    ]
    batch = Batch.of(rows)
    return float(
        (batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]).abs().max()
    )


def test_weights_reach_the_engine_and_only_when_published(model):
    host = build_host(config_of("grpo", model, *SMALL, "rollout.engine=vllm"))
    threads = torch.get_num_threads()
    assert gap(host.policy, host.engine) < 1e-3
    for number in range(1, 4):
        host.policy.update(random_batch(number), number)
        state = torch.get_rng_state()  # an update seeds the generator by its step
        assert gap(host.policy, host.engine) > 0.01, "an update moves the trainer away"
        host.engine.publish(host.policy.weights())
        assert gap(host.policy, host.engine) < 1e-3, "and the hand-over brings the engine after it"
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads)  # still torch's own function


def test_a_grpo_run_with_updates_that_the_engine_sees(model, tmp_path):
    before = sorted((model / "model.safetensors").stat()[i] for i in (6, 8))
    config = config_of(
        "grpo", model, *SMALL, "rollout.engine=vllm", f"runs={tmp_path}", varied(tmp_path)
    )
    lines = metrics_of(train(config, Reporter()).folder)
    assert lines[0]["engine/start_gap_max"] < 1e-3
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 3 and min(line["grad_norm"] for line in steps) > 0
    assert max(line["engine/gap_max"] for line in steps) < 1e-3, (
        "each step sampled from the weights of the step before"
    )
    assert sorted((model / "model.safetensors").stat()[i] for i in (6, 8)) == before
    assert not (tmp_path / "test" / "weights").exists(), "no weights went by disk"


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_pictures_and_trained_vision_weights_reach_the_engine(model_type, tmp_path):
    text = {"head_dim": 32}  # vLLM's kernels need 32
    if model_type == "qwen3_vl":
        sections = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
        text["rope_parameters"] = MROPE | sections
    model = save_vision_model(tmp_path, model_type, **text)
    host = build_host(
        config_of("grpo", model, *SMALL, "rollout.engine=vllm", "model.vision=trained")
    )
    requests = requests_with_pictures(host.policy.loaded)
    assert gap(host.policy, host.engine, requests) < 1e-4
    rows = [
        Trajectory(str(i), request.prompt, [1, 2, 3], i, images=request.images)
        for i, request in enumerate(requests)
    ]
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.linspace(-1, 1, batch.num_tokens)
    batch.tokens["old_logprobs"] = host.policy.logprobs(batch)["logprobs"]
    host.policy.update(batch, 1)
    assert gap(host.policy, host.engine, requests) > 0.01
    host.engine.publish(host.policy.weights())
    assert gap(host.policy, host.engine, requests) < 1e-4


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2 in the cache")
def test_a_real_model_in_bfloat16_agrees_with_the_trainer():
    overrides = (
        "rollout.engine=vllm",
        "model.dtype=bfloat16",
        "data.template=chat",
        "data.train=arithmetic:2:boxed:train",
    )
    config = config_of("grpo", SMOLLM2, *SMALL, *overrides, "rollout.max_response_tokens=24")
    host = build_host(config)
    prompts = Encoder(load_tokenizer(config.model), "chat")
    found = check_engine_gap(
        config, Ports(host.policy, host.engine, None, prompts), load_problems(config.data.train)
    )
    assert 0.0 < found["engine/start_gap_mean"] < 0.05


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="no peft")
def test_adapters_are_seen_by_the_engine(model, tmp_path):
    overrides = (
        "rollout.engine=vllm",
        "model.lora.rank=4",
        "optimizer.lr=5e-2",
        f"runs={tmp_path}",
        varied(tmp_path),
    )
    config = config_of("grpo", model, *SMALL, *overrides)
    steps = [line for line in metrics_of(train(config, Reporter()).folder) if "loss" in line]
    assert len(steps) == 3 and max(line["engine/gap_max"] for line in steps) < 1e-3
    saved = load_file(tmp_path / "test" / "checkpoints" / "step-3" / "policy" / "model.safetensors")
    base = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert float((saved[name] - base[name]).abs().max()) > 1e-3, (
        "the adapters moved what the engine had to follow"
    )


def test_in_a_process_of_its_own_it_takes_weights_too(model):
    overrides = (
        "rollout.engine=vllm",
        "cluster.backend=process",
        "cluster.engines=1",
        "cluster.wait_s=120",
    )
    with open_models(config_of("grpo", model, *SMALL, *overrides)) as placed:
        placed.policy.update(random_batch(1), 1)
        assert not placed.engine.shares_weights and gap(placed.policy, placed.engine) > 0.01
        placed.engine.publish(placed.policy.weights())
        assert gap(placed.policy, placed.engine) < 1e-3


def test_an_engine_whose_weights_stay_is_found_at_the_start(model, tmp_path, capsys, monkeypatch):
    from postgrad.rollout.vllm import VllmEngine

    monkeypatch.setattr(VllmEngine, "publish", lambda self, weights: None)
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides_of(model, *SMALL, "rollout.engine=vllm", f"runs={tmp_path}"),
            ]
        )
        == 1
    )
    assert "rollout.engine=vllm does not take new weights" in capsys.readouterr().err


def test_evaluation_gives_the_same_greedy_answers_whatever_the_engine(model, tmp_path, capsys):
    overrides = [
        "data=arithmetic:2:digits:test",
        "limit=12",
        "model.device=cpu",
        "template=plain",
        "rollout.max_response_tokens=4",
    ]
    for engine in ("native", "hf", "vllm"):
        assert (
            main(
                [
                    "eval",
                    str(model),
                    *overrides,
                    f"rollout.engine={engine}",
                    "rollout.cache_gib=0.25",
                    f"out={tmp_path / engine}",
                ]
            )
            == 0
        )
    answers = {p.parent.name: p.read_bytes() for p in tmp_path.glob("*/*.jsonl")}
    assert len(answers) == 3 and len(set(answers.values())) == 1


def test_a_device_that_vllm_does_not_run_on_is_one_line(model, tmp_path, capsys, monkeypatch):
    from postgrad.rollout import vllm

    monkeypatch.setattr(vllm, "platform", lambda: "xpu")
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides_of(model, *SMALL, "rollout.engine=vllm", f"runs={tmp_path}"),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "runs on xpu" in error and "model.device=cpu" in error


def test_doctor_shows_what_vllm_runs_on():
    line = next(line for _, line in doctor.engine_rows() if line.startswith("vllm: "))
    assert line.startswith("vllm: 0.") and "runs on cpu (no sleep mode" in line


# ---- vLLM's own server


def start(model: Path, log: Path, **environment: str) -> "tuple[subprocess.Popen[bytes], str]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The module behind `vllm serve`; the command itself does not work in the CPU build.
    program = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "--model",
        str(model),
        "--served-model-name",
        NAME,
        "--host",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        "--enforce-eager",
    ]
    command += ["--kv-cache-memory-bytes", str(1 << 28), "--logprobs-mode", "processed_logprobs"]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **environment}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return child, f"http://127.0.0.1:{port}/v1"


def wait(child: "subprocess.Popen[bytes]", url: str, log: Path, limit_s: float = 240.0) -> None:
    from urllib.error import URLError
    from urllib.request import urlopen

    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urlopen(f"{url}/models", timeout=2).close()
            return
        except (URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM's server did not start: {log.read_text()[-2000:]}")


def stop(child: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, number)
            child.wait(60)


@pytest.fixture(scope="module")
def served(untied, tmp_path_factory):
    """vLLM's OpenAI server with the calls that take weights."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    child, url = start(untied, log, VLLM_SERVER_DEV_MODE="1")
    try:
        wait(child, url, log)
        yield f"{url}#{NAME}"
    finally:
        stop(child)


@pytest.fixture(scope="module")
def prompts(untied):
    return Encoder(load_tokenizer(config_of("grpo", untied).model), "plain")


def test_the_server_continues_token_ids_with_log_probs_of_the_model(served, untied, prompts):
    host = build_host(config_of("grpo", untied, *SMALL))
    engine = HttpEngine(Address.parse(served), prompts, 60)
    assert gap(host.policy, engine) < 1e-3 and engine.takes_ids
    greedy = engine.generate(REQUESTS, Sampling(0.0, 6))
    assert [[c.tokens for c in g] for g in greedy] == [
        [c.tokens for c in g] for g in host.engine.generate(REQUESTS, Sampling(0.0, 6))
    ]


def test_the_server_takes_new_weights(served, untied, prompts, tmp_path):
    host = build_host(config_of("grpo", untied, *SMALL))
    engine = HttpEngine(
        Address.parse(served), prompts, 60, stop_ids=[END], weights_folder=tmp_path / "weights"
    )
    host.policy.update(random_batch(1), 1)
    assert engine.weights.api.server == "vLLM" and gap(host.policy, engine) > 0.01
    engine.publish(host.policy.weights())
    assert gap(host.policy, engine) < 1e-3


def test_a_run_and_a_classmate_over_the_server(served, untied, tmp_path):
    mate = f'method.classmates=["{served.replace("#", f"?tokenizer={untied}#")}"]'
    overrides = (
        "rollout.engine=http",
        f"rollout.url={served}",
        f"runs={tmp_path}",
        varied(tmp_path),
        mate,
        "method.classmate_max_tokens=4",
    )
    config = config_of("classmate", untied, *SMALL, *overrides)
    steps = [line for line in metrics_of(train(config, Reporter()).folder) if "loss" in line]
    assert len(steps) == 3 and max(line["engine/gap_max"] for line in steps) < 1e-3
    assert all(any(name.startswith("classmate/") for name in line) for line in steps)


def test_a_server_without_those_calls_is_refused(untied, prompts, tmp_path):
    log = tmp_path / "log.txt"
    child, url = start(untied, log)
    try:
        wait(child, url, log)
        with pytest.raises(ConfigError, match=r"^rollout\.url: .* new weights"):
            HttpEngine(
                Address.parse(f"{url}#{NAME}"), prompts, 60, stop_ids=[END], weights_folder=tmp_path
            )
    finally:
        stop(child)
