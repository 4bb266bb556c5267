"""4-bit base weights: NF4 codes, gradients of adapters, one policy behind all ports, files."""

import pytest
import torch
from families import make_family
from refused import refused
from tiny_runs import config_of, metrics_of, random_batch, stock_model, stock_outputs, toy_run
from torch import nn

from postgrad.cluster.host import build_host
from postgrad.model.load.gate import fingerprint
from postgrad.model.load.tiny import make_tiny
from postgrad.model.lora import adapter_parameters, adapters_disabled
from postgrad.model.quantized import (
    LEVELS,
    QuantizedLinear,
    concatenate,
    dequantize_reference,
    quantize,
    quantize_linears,
    quantized_modules,
    split_rows,
)
from postgrad.rollout.engine import Request, Sampling
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

pytest.importorskip("peft")

FOUR_BIT = ("model.quantization=4bit", "model.lora.rank=4", "optimizer.lr=2e-2")


def nearest_levels(weight: torch.Tensor) -> torch.Tensor:
    """The slow reference: each weight, in its block of 64, becomes the nearest level."""
    out = torch.empty_like(weight)
    table = torch.tensor(LEVELS, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 64):
            block = weight[row, start : start + 64].double()
            scale = block.abs().max()
            for i, value in enumerate(block):
                distances = (table * scale - value).abs()
                out[row, start + i] = (table[distances.argmin()] * scale).float()
    return out


def test_each_weight_becomes_the_nearest_level_of_its_block():
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    weight[1, 64:] = 0.0
    quantized = quantize(weight)
    torch.testing.assert_close(quantized.dequantize(), nearest_levels(weight), rtol=1e-6, atol=0)
    assert quantized.nbytes == 3 * 128 // 2 + 3 * 2 * 4
    assert not quantized.dequantize()[1, 64:].any()
    assert quantize(weight.bfloat16()).dequantize().dtype == torch.bfloat16


def test_codes_are_those_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = quantize(weight)
    assert torch.equal(packed.flatten(), ours.codes.flatten())
    assert torch.equal(state.absmax.flatten(), ours.scales.flatten())
    theirs = bnb.dequantize_4bit(packed, state)
    torch.testing.assert_close(ours.dequantize(), theirs, rtol=1e-6, atol=0)


def test_rows_of_several_matrices_share_one():
    parts = [quantize(torch.randn(rows, 64)) for rows in (2, 3)]
    fused = concatenate(parts)
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))
    for part, view in zip(parts, split_rows(fused, [2, 3]), strict=True):
        assert torch.equal(part.dequantize(), view.dequantize())
        assert view.codes.untyped_storage().data_ptr() == fused.codes.untyped_storage().data_ptr()


def test_a_layer_has_the_gradients_of_its_dequantized_matrix():
    plain = nn.Linear(64, 8)
    layer = QuantizedLinear(quantize(plain.weight), nn.Parameter(plain.bias.detach().clone()))
    plain.weight.data.copy_(layer.weight)
    x = torch.randn(2, 5, 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model whose rows are whole blocks."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny64", seed=1, width=64)


@pytest.fixture
def host(tiny):
    return build_host(config_of("grpo", tiny, *FOUR_BIT))


def as_dense(model: nn.Module) -> None:
    """Replace the 4-bit layers by plain ones with the dequantized weights."""
    for name, module in quantized_modules(model).items():
        plain = nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight = nn.Parameter(module.weight, requires_grad=False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)


@pytest.mark.slow
def test_adapters_train_as_on_the_dequantized_model(tiny, host):
    """The other model has the same adapters and plain layers with the dequantized weights."""
    other = build_host(config_of("grpo", tiny, *FOUR_BIT))
    as_dense(other.policy.model)
    assert len(quantized_modules(host.policy.model)) == 7 * 2
    assert not quantized_modules(other.policy.model)
    batch = random_batch(3)
    for step in (1, 2, 3):
        ours, theirs = (h.policy.update(batch, step) for h in (host, other))
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    expected = adapter_parameters(other.policy.model)
    for name, p in adapter_parameters(host.policy.model).items():
        torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=1e-6)
        assert p.requires_grad


def test_the_engine_samples_from_the_quantized_and_adapted_policy(host):
    for step in (1, 2, 3):
        host.policy.update(random_batch(3), step)
    requests = [Request([1, 2, 3], [7, 8, 9]), Request([4, 15], [10])]
    sampled = host.engine.generate(requests, Sampling(1.0, 8))
    rows: list[Trajectory] = []
    logprobs: list[float] = []
    for request, group in zip(requests, sampled, strict=True):
        for completion in group:
            rows.append(Trajectory("u", request.prompt, completion.tokens, 0, 0))
            logprobs += completion.logprobs
    ours = host.policy.logprobs(Batch.of(rows))["logprobs"]
    torch.testing.assert_close(ours, torch.tensor(logprobs), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_files_hold_the_dequantized_model_and_the_adapter(tiny, tmp_path, host):
    """The stock model of `policy/` gives our log-probs; without adapters it is the reference."""
    batch = random_batch(3)
    with adapters_disabled(host.policy.model):
        base = host.policy.logprobs(batch)["logprobs"]
    host.policy.update(batch, 1)
    host.policy.update(batch, 2)
    ours = host.policy.logprobs(batch)["logprobs"]
    with adapters_disabled(host.policy.model):
        assert torch.equal(host.policy.logprobs(batch)["logprobs"], base)
    host.policy.save(str(tmp_path))
    with torch.no_grad():
        stock, _ = stock_outputs(stock_model(tmp_path / "policy"), batch)
        original, _ = stock_outputs(stock_model(tiny), batch)
    torch.testing.assert_close(stock.float(), ours, rtol=0, atol=1e-5)
    assert (original.float() - base).abs().max() > 1e-3, "4 bits change the base model"
    again = build_host(config_of("grpo", tiny, *FOUR_BIT))
    again.policy.load(str(tmp_path))
    assert torch.equal(again.policy.logprobs(batch)["logprobs"], ours)


@pytest.mark.slow
def test_a_run_with_a_reference_has_no_gap_between_engine_and_trainer(tiny, tmp_path):
    config = config_of(
        "grpo",
        tiny,
        *FOUR_BIT,
        *toy_run(),
        f"runs={tmp_path}",
        "method.kl=loss",
        "method.kl_coef=0.1",
    )
    train(config, Reporter())
    for line in metrics_of(tmp_path / "test"):
        assert line["engine/gap_max"] < 1e-4


def test_models_that_cannot_be_quantized_are_refused():
    model = make_family("qwen3_moe", hidden_size=64)
    with refused("unsupported", "model.quantization"):
        quantize_linears(model, torch.device("cpu"))
    with refused("unsupported", "model.quantization", shows="multiple of 64"):
        quantize_linears(make_family("qwen3", hidden_size=32), torch.device("cpu"))


def test_biases_of_4_bit_layers_are_frozen():
    """The numeric gate refuses passes without a trained parameter; the fused layers copy biases."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    model = make_family("qwen2", **shape, num_key_value_heads=2, head_dim=16)
    quantize_linears(model, torch.device("cpu"))
    biases = [module.bias for module in quantized_modules(model).values()]
    assert [b.requires_grad for b in biases if b is not None] == [False] * 6
    assert model.model.norm.weight.requires_grad


def test_the_reference_of_the_kernel_is_exact_in_bfloat16():
    weight = quantize(torch.randn(2, 64).bfloat16())
    float32 = quantize(torch.randn(2, 64))
    float32.codes, float32.scales = weight.codes, weight.scales
    assert torch.equal(dequantize_reference(float32).bfloat16(), weight.dequantize())


def test_a_verdict_of_the_numeric_gate_is_of_4_bit_models_or_others():
    model = make_family("qwen3", hidden_size=64, intermediate_size=64, head_dim=32)
    plain = fingerprint(model)
    quantize_linears(model, torch.device("cpu"))
    assert (
        fingerprint(model)
        != plain
        == fingerprint(make_family("qwen3", hidden_size=64, intermediate_size=64, head_dim=32))
    )
