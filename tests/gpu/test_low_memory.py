"""4-bit weights, 8-bit optimizer state and kept attention on a GPU.

Run with: make test-gpu
"""

import pytest
import torch
from tiny_runs import random_batch

from postgrad.cluster.host import build_host
from postgrad.config.compose import compose
from postgrad.data.problems import load_problems
from postgrad.methods import find_method
from postgrad.model.load.tiny import make_tiny
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.quantized import dequantize_reference, quantize, quantized_modules
from postgrad.rollout.engine import Request, Sampling
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
FOUR_BIT = ("model.quantization=4bit", "model.lora.rank=4", "optimizer.lr=2e-2")
RECOMPUTE = "model.activation_checkpointing=true"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose rows are whole blocks of 64 weights."""
    return make_tiny(tmp_path_factory.mktemp("models") / "wide", seed=0, layers=4, width=256)


def make_host(folder, *overrides):
    common = [f"model.path={folder}", "data.train=arithmetic:1", "data.template=plain"]
    settings = [*common, "model.device=cuda", "model.threads=1", *overrides]
    if not any(word.startswith("model.dtype=") for word in overrides):
        settings.append("model.dtype=bfloat16")
    return build_host(compose("grpo", settings, lambda name: find_method(name).Settings))


def gradients_of(host, batch) -> dict[str, torch.Tensor]:
    policy = host.policy
    prepared = policy.objective.prepare(batch)
    policy.accumulate(prepared, policy.objective.view(1), MetricAccumulator())
    return {name: m.grad.clone() for name, m in policy.optimizer.masters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (1000, 1536), (4096, 4096)])
def test_the_kernel_gives_the_bits_of_the_reference(dtype, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    on_cpu = quantize(weight)
    on_gpu = quantize(weight.to(CUDA))
    assert torch.equal(on_gpu.codes.cpu(), on_cpu.codes), "a resumed run quantizes to the same"
    assert torch.equal(on_gpu.scales.cpu(), on_cpu.scales)
    assert torch.equal(on_gpu.dequantize(), dequantize_reference(on_gpu))
    assert torch.equal(on_gpu.dequantize().cpu(), on_cpu.dequantize())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_captured_decode_step_samples_from_the_4_bit_policy(wide, dtype):
    pytest.importorskip("peft")
    host = make_host(wide, *FOUR_BIT, f"model.dtype={dtype}")
    assert host.engine.decoder is not None, "the paged decoder runs"
    assert len(quantized_modules(host.policy.model)) == 7 * 4
    problems = load_problems("arithmetic:1")[:4]
    requests = [Request([1, 2, 3 + i], list(range(8))) for i in range(len(problems))]
    for step in (1, 2, 3):
        rows: list[Trajectory] = []
        sampled: list[float] = []
        for group, request in enumerate(requests):
            for completion in host.engine.generate([request], Sampling(1.0, 8))[0]:
                rows.append(Trajectory("u", request.prompt, completion.tokens, group, 0))
                sampled += completion.logprobs
        gap = (host.policy.logprobs(Batch.of(rows))["logprobs"] - torch.tensor(sampled)).abs()
        assert gap.max() < (1e-3 if dtype == "float32" else 0.2), step
        assert gap.mean() < (1e-4 if dtype == "float32" else 0.02), step
        assert host.policy.update(random_batch(3), step)["grad_norm"] > 0


@pytest.mark.parametrize("overrides", [(), FOUR_BIT], ids=["full", "4-bit"])
def test_kept_attention_gives_the_same_gradients_and_is_computed_once(wide, overrides, monkeypatch):
    if overrides:
        pytest.importorskip("peft")
    from postgrad.model.kernels import packed_attention

    calls: list[int] = []
    attend = packed_attention._attend
    monkeypatch.setattr(packed_attention, "_attend", lambda *args: calls.append(1) or attend(*args))
    batch = random_batch(3, groups=32, samples=8)
    gradients: list[dict[str, torch.Tensor]] = []
    counts: list[int] = []
    for kept in (0, 3):
        host = make_host(wide, RECOMPUTE, f"model.kept_attention_blocks={kept}", *overrides)
        calls.clear()
        gradients.append(gradients_of(host, batch))
        counts.append(len(calls))
    assert counts[0] % 8 == 0 and counts[1] == counts[0] // 8 * 5, "3 of 4 blocks compute it once"
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-2, atol=1e-4, msg=name)


def test_8_bit_state_takes_2_bytes_per_weight(wide):
    host = make_host(wide, "optimizer.kind=adamw_8bit", "optimizer.lr=1e-3")
    first = host.policy.update(random_batch(3), 1)
    assert first["grad_norm"] > 0
    state = host.policy.optimizer.adam.state
    num_bytes = sum(t.nbytes for values in state.values() for t in values.values())
    assert num_bytes < 2.1 * sum(p.numel() for p in state) + 10_000
