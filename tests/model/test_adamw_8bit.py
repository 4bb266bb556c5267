"""AdamW with 8-bit moments: levels, rounding, and steps close to those in float32."""

import pytest
import torch

from postgrad.model.optimizers import adamw_8bit
from postgrad.model.optimizers.adamw_8bit import (
    AdamW8bit,
    dequantize_blocks,
    dynamic_levels,
    quantize_blocks,
)

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def round_trip(values: torch.Tensor, signed: bool) -> torch.Tensor:
    codes = torch.zeros(len(values), dtype=torch.uint8)
    scales = torch.zeros(-(-len(values) // 256))
    quantize_blocks(values, signed, codes, scales)
    return dequantize_blocks(codes, scales, signed)


def test_levels_by_hand():
    signed = dynamic_levels(signed=True)
    unsigned = dynamic_levels(signed=False)
    assert len(signed) == len(unsigned) == len(signed.unique()) == len(unsigned.unique()) == 256
    assert signed[-1] == unsigned[-1] == 1.0 and unsigned[0] == 0.0
    # The lowest decade has one signed level, the center of 0.1..1, and two unsigned ones.
    torch.testing.assert_close(signed[128:129], torch.tensor([0.55e-6]))
    torch.testing.assert_close(unsigned[1:3], torch.tensor([0.325e-6, 0.775e-6]))


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_bitsandbytes(signed):
    bnb = pytest.importorskip("bitsandbytes.functional")
    theirs = bnb.create_dynamic_map(signed=signed)
    torch.testing.assert_close(dynamic_levels(signed), theirs.cpu(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_values_become_the_nearest_level_of_their_block(signed):
    values = torch.randn(600, generator=torch.Generator().manual_seed(3))
    values = values if signed else values.square()
    values[:256] *= 1e-9  # each block has its own scale; the last one is shorter
    actual = round_trip(values, signed)
    levels = dynamic_levels(signed)
    for start in (0, 256, 512):
        block = values[start : start + 256]
        scaled = levels * block.abs().max()
        nearest = scaled[(block[:, None] - scaled[None]).abs().argmin(1)]
        if not signed:
            nearest = torch.where(block > 0, nearest.clamp(min=float(scaled[1])), nearest)
        torch.testing.assert_close(actual[start : start + 256], nearest, rtol=1e-6, atol=0)


def test_a_positive_square_never_becomes_zero():
    values = torch.zeros(256)
    values[:3] = torch.tensor([1.0, 1e-12, 0.0])
    actual = round_trip(values, signed=False)
    assert actual[0] == 1.0 and actual[1] > 0 and not actual[2:].any()


def steps_of(kind: type, values: torch.Tensor, gradients: list[torch.Tensor]):
    p = torch.nn.Parameter(values.clone())
    optimizer = kind([p], **OPTIONS)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach(), optimizer.state[p]


def test_steps_are_close_to_those_in_float32_and_slices_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(70, 100, generator=generator)
    gradients = [torch.randn(70, 100, generator=generator) * 0.1 for _ in range(8)]
    exact, _ = steps_of(torch.optim.AdamW, values, gradients)
    ours, state = steps_of(AdamW8bit, values, gradients)
    moved = (exact - values).abs().mean()
    assert (ours - exact).abs().mean() < 0.05 * moved
    assert (ours - exact).abs().max() > 0, "the state is rounded"
    assert state["exp_avg_codes"].dtype == torch.uint8
    assert sum(t.nbytes for t in state.values()) < 2.1 * values.numel()
    monkeypatch.setattr(adamw_8bit, "SLICE_ELEMENTS", 512)
    assert torch.equal(steps_of(AdamW8bit, values, gradients)[0], ours)


def test_small_parameters_take_exact_steps():
    gradients = [torch.full((5,), 0.1 * i) for i in range(1, 4)]
    exact, _ = steps_of(torch.optim.AdamW, torch.ones(5), gradients)
    ours, state = steps_of(AdamW8bit, torch.ones(5), gradients)
    assert torch.equal(ours, exact)
    assert state["exp_avg"].dtype == torch.float32
