"""Attention outputs that recomputed blocks keep: their bytes, and how many fit."""

import pytest
from qwen_runs import Run, recompute
from qwen_runs import make_plan as plan_of

from postgrad.model.passes.recompute import keep_attention
from postgrad.sizing.choose import SPARE_SHARE, choose_kept_attention
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.memory import block_attention_bytes, estimate
from postgrad.sizing.simulate import PassSimulation
from postgrad.sizing.workload import Pass, Plan, lay_out_step

NUM_BLOCKS = 28


def make_plan(kept: int, tokens: int = 16_284, rows: int = 1) -> Plan:
    return plan_of(Run("update", "0.6b", rows, 1, tokens, recompute(kept)))


@pytest.mark.slow
def test_bytes_are_those_of_simulated_passes() -> None:
    plan = make_plan(0, tokens=924)
    one = Pass(1024, 100)
    without, kept = (PassSimulation(plan.config, plan.model, packed=True) for _ in range(2))
    for policy in kept.models:
        keep_attention(policy.model, NUM_BLOCKS)
    more = kept.run(one).kept - without.run(one).kept
    layout = lay_out_step(plan)
    assert (
        layout.largest_pass.tokens == one.tokens - 1
    )  # the prompt's last token is the response's first
    assert more == pytest.approx(NUM_BLOCKS * block_attention_bytes(plan, layout), rel=0.01)
    gpu = find_gpu("h200")
    memory = [estimate(make_plan(n, 924), gpu).phases["update"] for n in (0, 7, 99)]
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
        return estimate(make_plan(number, rows=2), gpu).bytes_in("update")

    assert peak(num_kept) <= SPARE_SHARE * gpu.usable < peak(num_kept + 1)
    assert choose_kept_attention(plan, find_gpu("h200", 12)) == 0


@pytest.mark.slow
def test_gradients_of_a_single_pass_take_the_place_of_activations() -> None:
    """Of two passes, the second begins beside all gradients of the first."""
    gpu = find_gpu("h200")
    one, two = (estimate(make_plan(0, rows=rows), gpu).phases["update"] for rows in (1, 2))
    assert {**one, "gradients": 0} == {**two, "gradients": 0}
    head = 4 * 151_936 * 1024
    assert one["gradients"] == two["gradients"] - one["activations"] > head
    long = estimate(make_plan(8, 65_436), gpu).phases["update"]
    assert long["gradients"] == head
