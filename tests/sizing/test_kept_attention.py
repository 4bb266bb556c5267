"""Attention outputs that recomputed blocks keep: their bytes, and how many fit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from postgrad.model.passes.recompute import keep_attention
from postgrad.sizing.choose import SPARE_SHARE, choose_kept_attention
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.gpu_memory import GpuEstimator, block_attention_bytes
from postgrad.sizing.packed import PackedSimulation
from postgrad.sizing.plan import Plan, lay_out_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/gpu"))

import fit_check  # pyright: ignore[reportMissingImports]

NUM_BLOCKS = 28


def make_plan(kept: int, tokens: int = 16_284, rows: int = 1) -> Plan:
    row = fit_check.Row("update", "0.6b", rows, 1, tokens, fit_check.recompute(kept))
    return fit_check.make_plan(row)


@pytest.mark.slow
def test_bytes_are_those_of_simulated_passes() -> None:
    plan = make_plan(0, tokens=924)
    config = replace(plan.config, model=replace(plan.config.model))
    tokens = 1024
    without, kept = (PackedSimulation(config, plan.model) for _ in range(2))
    for policy in kept.models:
        keep_attention(policy.model, NUM_BLOCKS)
    more = kept.run(tokens, 100).kept - without.run(tokens, 100).kept
    layout = lay_out_step(plan, 924)
    assert max(layout.passes)[0] == tokens - 1  # the prompt's last token is the response's first
    assert more == pytest.approx(NUM_BLOCKS * block_attention_bytes(plan, layout), rel=0.01)
    estimator = GpuEstimator(find_gpu("h200"))
    memory = [estimator.estimate(make_plan(n, 924)).phases["update"] for n in (0, 7, 99)]
    parts = [part.get("kept attention", 0) for part in memory]
    assert parts[0] == 0 and parts[2] == 4 * parts[1] > 0


@pytest.mark.slow
def test_as_many_are_kept_as_fit() -> None:
    plan = make_plan(0, rows=2)
    assert choose_kept_attention(plan, find_gpu("h200")) == NUM_BLOCKS
    gpu = find_gpu("h200", 17)
    num_kept = choose_kept_attention(plan, gpu)
    assert 0 < num_kept < NUM_BLOCKS

    def peak(number: int) -> int:
        memory = GpuEstimator(gpu).estimate(make_plan(number, rows=2))
        return sum(memory.held.values()) + sum(memory.phases["update"].values())

    assert peak(num_kept) <= SPARE_SHARE * gpu.usable < peak(num_kept + 1)
    assert choose_kept_attention(plan, find_gpu("h200", 12)) == 0


@pytest.mark.slow
def test_gradients_of_a_single_pass_take_the_place_of_activations() -> None:
    """Of two passes, the second begins beside all gradients of the first."""
    estimator = GpuEstimator(find_gpu("h200"))
    one, two = (estimator.estimate(make_plan(0, rows=rows)).phases["update"] for rows in (1, 2))
    assert {**one, "gradients": 0} == {**two, "gradients": 0}
    head = 4 * 151_936 * 1024
    assert one["gradients"] == two["gradients"] - one["activations"] > head
    long = estimator.estimate(make_plan(8, 65_436)).phases["update"]
    assert long["gradients"] == head
