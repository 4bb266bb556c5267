"""Engine, trainer and a complete run on a GPU. Run with: make test-gpu"""

import subprocess
import sys

import pytest
import torch

from postgrad.cluster.host import build_host
from postgrad.config.compose import compose
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.methods import find_method
from postgrad.methods.method import Ports, Step
from postgrad.rollout.engine import Request, Sampling, trajectory_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_config(tiny, *overrides):
    common = [
        f"model.path={tiny}",
        "data.train=arithmetic:2:digits",
        "data.template=plain",
        "model.threads=1",
    ]
    return compose(
        "grpo",
        [*common, "rollout.max_response_tokens=8", *overrides],
        lambda name: find_method(name).Settings,
    )


def build_method(config):
    from postgrad.data.encode.encoder import Encoder
    from postgrad.verifiers.scorer import Scorer

    host = build_host(config)
    method = find_method("grpo")(config)
    scorer = Scorer("exact")
    method.bind(
        Ports(host.policy, host.engine, scorer, Encoder(host.policy.loaded.tokenizer, "plain"))
    )
    return host, method


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_agree_on_the_gpu(tiny, dtype):
    host, method = build_method(make_config(tiny, "model.device=cuda", f"model.dtype={dtype}"))
    problems = load_problems("arithmetic:2:digits")[:16]
    step = Step(1, ProblemQueue(problems))
    batch = method.sample(method.compose(problems, step), step)
    ours = host.policy.logprobs(batch)["logprobs"]
    gap = (ours - batch.tokens["behavior_logprobs"]).abs()
    assert gap.max() < (1e-3 if dtype == "float32" else 0.2), gap.max()
    assert gap.mean() < (1e-4 if dtype == "float32" else 0.02), gap.mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_agree_with_adapters(tiny, dtype):
    """The captured decode step and the packed pass add the adapters' outputs, trained or not."""
    pytest.importorskip("peft")
    lora = ("model.lora.rank=4", "optimizer.lr=2e-2")
    config = make_config(tiny, "model.device=cuda", f"model.dtype={dtype}", *lora)
    host, method = build_method(config)
    assert host.engine.decoder is not None, "the paged decoder runs"
    problems = load_problems("arithmetic:2:digits")[:16]
    mean_logprobs = []
    for number in (1, 2, 3):
        step = Step(number, ProblemQueue(problems))
        batch = method.sample(method.compose(problems, step), step)
        ours = host.policy.logprobs(batch)["logprobs"]
        gap = (ours - batch.tokens["behavior_logprobs"]).abs()
        assert gap.max() < (1e-3 if dtype == "float32" else 0.2), number
        assert gap.mean() < (1e-4 if dtype == "float32" else 0.02), number
        batch.tokens["advantages"] = batch.expand(torch.linspace(-1, 1, len(batch)))
        assert host.policy.update(batch, number)["grad_norm"] > 0
        mean_logprobs.append(ours.mean().item())
        assert bool(host.policy.token_stats()["entropy"].isfinite().any())
    assert abs(mean_logprobs[0] - mean_logprobs[-1]) > 1e-3, "the sampled policy has changed"


def test_greedy_on_the_gpu_equals_the_cpu_and_transformers(tiny):
    prompts = [[3, 7, 10, 5, 8, 15], [1, 2, 10, 9, 9, 15], [4, 4, 10, 0, 1, 15]]
    requests = [Request(p, [trajectory_seed(0, 1, str(i), 0)]) for i, p in enumerate(prompts)]
    gpu, _ = build_method(make_config(tiny, "model.device=cuda", "model.dtype=float32"))
    cpu, _ = build_method(make_config(tiny, "model.device=cpu", "model.dtype=float32"))
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    on_gpu = [c[0].tokens for c in gpu.engine.generate(requests, sampling)]
    assert on_gpu == [c[0].tokens for c in cpu.engine.generate(requests, sampling)]
    for prompt, tokens in zip(prompts, on_gpu, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        stock = gpu.policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert stock[0, len(prompt) :].tolist() == tokens


def test_the_update_on_the_gpu_equals_the_update_on_the_cpu(tiny):
    weights = {}
    for device in ("cpu", "cuda"):
        host, method = build_method(
            make_config(tiny, f"model.device={device}", "model.dtype=float32", "optimizer.lr=1e-3")
        )
        if device == "cpu":
            problems = load_problems("arithmetic:2:digits")[:16]
            step = Step(1, ProblemQueue(problems))
            batch = method.sample(method.compose(problems, step), step)
            batch.tokens["advantages"] = batch.expand(torch.linspace(-1, 1, len(batch)))
        host.policy.update(batch, 1)
        weights[device] = {name: w.cpu() for name, w in host.policy.weights().items()}
    for name, cpu in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][name], cpu, atol=2e-4, rtol=1e-3)


def test_a_complete_run_on_the_gpu_writes_a_checkpoint(tiny, tmp_path):
    overrides = [
        f"model.path={tiny}",
        "data.train=arithmetic:2:digits",
        "data.template=plain",
        "rollout.max_response_tokens=8",
    ]
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "train",
        "grpo",
        *overrides,
        "model.device=cuda",
        "training.steps=3",
    ]
    process = subprocess.run(
        [*command, f"runs={tmp_path}", "name=x"], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "x" / "checkpoints" / "step-3" / "policy" / "model.safetensors").is_file()
