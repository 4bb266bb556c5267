"""Memory and time of a run on a GPU, computed without one: by hand and against the trainer."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixture_types import Capture, Patch
from refused import refused

from postgrad.cli.main import main
from postgrad.cli.train import compose_arguments
from postgrad.config.schema import Config
from postgrad.doctor.fit import read_workload
from postgrad.methods import find_method
from postgrad.model.load.load import model_config
from postgrad.model.load.tiny import make_tiny
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.sizing.choose import largest_settings
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.memory import (
    estimate,
    is_captured,
    optimizer_working_bytes,
    state_bytes,
    wanted_cache_bytes,
)
from postgrad.sizing.simulate import PassSimulation, measure_size
from postgrad.sizing.workload import (
    GroupLengths,
    Pass,
    Plan,
    Workload,
    lay_out_step,
    plan_of_settings,
    runs_packed,
)
from postgrad.training.prepare import prepare
from postgrad.training.resolve import local_roles, row_kinds
from postgrad.types import Batch, Trajectory

GIB = 2**30


def make_config(model: Path, *overrides: str) -> Config:
    fixed = ["model.device=cuda", "model.dtype=bfloat16", "data.train=arithmetic:2"]
    return compose_arguments(["grpo", f"model.path={model}", *fixed, *overrides])


def make_plan(model: Path, groups: int, samples: int, *overrides: str) -> Plan:
    config = make_config(model, *overrides)
    workload = Workload([GroupLengths(11, (), samples)] * groups, 11)
    return Plan(config, model_config(config.model), workload, packed=True)


MIXED = [GroupLengths(11, (3, 40), 2), GroupLengths(5, (), 3), GroupLengths(7, (0, 9), 0)]
PAIRS = [GroupLengths(11, lengths, 0, 2) for lengths in ((3, 40), (20, 20), (9, 1))]


@pytest.mark.parametrize("budget", [10, 40, 64, 100, 1000])
@pytest.mark.parametrize("groups", [MIXED, PAIRS])
def test_passes_are_those_of_the_trainer(
    tiny: Path, groups: list[GroupLengths], budget: int
) -> None:
    """Also that the rows which one loss reads jointly are in one pass."""
    words = [f"training.token_budget={budget}", "rollout.max_response_tokens=20"]
    config = make_config(tiny, *words)
    layout = lay_out_step(Plan(config, None, Workload(groups, 11)))
    rows: list[Trajectory] = []
    units: list[int] = []
    for number, group in enumerate(groups):
        for place, length in enumerate([*group.given, *[20] * group.num_samples]):
            # Prompts are in order, because the trainer sorts by them.
            rows.append(Trajectory(str(number), [number] * group.prompt, [0] * length, number))
            units.append(10 * number + place // group.rows_per_loss)
    passes = make_packed_micro_batches(Batch.of(rows), budget, units)
    expected = [(micro.num_tokens, len(micro.gather)) for micro in passes]
    assert [(one.tokens, one.response_tokens) for one in layout.passes] == expected
    assert layout.num_rows == len(rows)


@pytest.mark.parametrize(
    ("recipe", "group"),
    [
        ("grpo", GroupLengths(100, (), 8)),
        ("sft", GroupLengths(100, (400,), 0)),
        ("kto", GroupLengths(100, (400, 400), 0)),
        ("dpo", GroupLengths(100, (400, 400), 0, 2)),
        ("reward_model", GroupLengths(100, (400, 400), 0, 2)),
        ("online_dpo", GroupLengths(100, (), 8, 2)),
    ],
)
def test_the_plan_has_the_rows_that_the_method_trains_on(
    tiny: Path, recipe: str, group: GroupLengths
) -> None:
    settings = ["data.max_prompt_tokens=100", "rollout.max_response_tokens=400"]
    words = [f"model.path={tiny}", "data.train=arithmetic:2", "rollout.samples=8", *settings]
    config = compose_arguments([recipe, *words])
    method = find_method(config.method.name)(config)
    plan = plan_of_settings(config, model_config(config.model), {}, row_kinds(method))
    assert set(plan.workload.groups) == {group}
    assert bool(plan.decode_rows) == method.traits.samples


@pytest.mark.parametrize("recipe", ["kto", "dpo"])
def test_a_pair_is_planned_as_the_rows_it_becomes(recipe: str, tiny: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "12"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair | {"uid": str(i)}) + "\n" for i in range(8)))
    words = [f"model.path={tiny}", f"data.train={file}", "training.problems_per_step=4"]
    words += ["model.threads=1", "rollout.max_response_tokens=16"]
    config = compose_arguments([recipe, *words])
    run = prepare(config)
    run.scorer.close()
    composed = read_workload(run)
    kinds = row_kinds(run.method)
    planned = plan_of_settings(run.config, model_config(config.model), {}, kinds).workload
    num_rows = [len(group.given) for group in planned.groups]
    assert num_rows == [len(group.given) for group in composed.groups] == [2] * 4


def test_an_engine_apart_gives_its_cache_back_while_the_trainer_works(
    tiny: Path, monkeypatch: Patch
) -> None:
    """Unless it samples then. A small cache stays in any case."""
    gpu = find_gpu("h200")
    apart = make_plan(tiny, 2, 4, "cluster.backend=process", "cluster.engines=1")
    stale = dataclasses.replace(apart.config.rollout, staleness=1)
    ahead = dataclasses.replace(apart, config=dataclasses.replace(apart.config, rollout=stale))
    small = estimate(apart, gpu)
    assert "rollout" not in small.phases
    monkeypatch.setattr("postgrad.sizing.memory.KEPT_CACHE_BYTES", 0)
    cache = wanted_cache_bytes(apart)
    large = estimate(apart, gpu)
    assert large.phases["rollout"] == {"KV cache": cache}
    assert large.held["engine process"] == small.held["engine process"] - cache
    assert estimate(ahead, gpu).held == small.held


def test_a_block_keeps_what_its_kernels_save(tiny: Path) -> None:
    """Width 32, heads of 8: 4 of queries, 2 of keys; 64 wide inside; two blocks; bfloat16."""
    config = make_config(tiny)
    simulation = PassSimulation(config, model_config(config.model), packed=True)
    tokens = 4096
    queries, keys = 4 * 8, 2 * 8
    residuals = 2 * 32  # before attention and before the MLP
    normed = 2 * 32
    inputs_of_norms = queries + keys
    attention = queries + 2 * keys + queries  # q, k, v and the output
    block = 2 * (residuals + normed + inputs_of_norms + attention + 2 * 64)
    block += 4 * (2 + 4 + 2)  # 1 / rms of two norms and of each head's norm, in float32
    block += 4 * 4  # log-sum-exp of each head
    kept = simulation.run(Pass(tokens, 1000)).kept
    assert kept / tokens == pytest.approx(2 * block, rel=0.2)
    assert simulation.run(Pass(2 * tokens, 1000)).kept == pytest.approx(2 * kept, rel=0.01)


@pytest.mark.slow
def test_checkpointing_keeps_less_and_lora_trains_less(tiny: Path) -> None:
    model = model_config(make_config(tiny).model)
    full = PassSimulation(make_config(tiny), model, packed=True).run(Pass(1024, 512))
    checkpointing = make_config(tiny, "model.activation_checkpointing=true")
    checkpointed = PassSimulation(checkpointing, model, packed=True).run(Pass(1024, 512))
    assert checkpointed.kept < 0.5 * full.kept
    lora = make_config(tiny, "model.lora.rank=4")
    assert measure_size(lora, model).trained < 0.2 * measure_size(lora, model).parameters
    assert PassSimulation(lora, model, packed=True).run(Pass(1024, 512)).kept > full.kept


def test_muon_keeps_one_number_per_weight_of_a_matrix(tiny: Path) -> None:
    config = make_config(tiny, "optimizer.kind=muon")
    size = measure_size(config, model_config(config.model))
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert size.matrices == 2 * block
    state = state_bytes(config, size)
    assert state["optimizer state"] == 4 * size.matrices + 8 * (size.trained - size.matrices)
    assert optimizer_working_bytes(config, size) == max(12 * 32 * 64, 4 * (18 * 32 + 5 * 32 + 32))


def test_memory_of_the_parts_by_hand(tiny: Path) -> None:
    plan = make_plan(tiny, 2, 4, "rollout.max_response_tokens=100", "optimizer.kind=adamw_fused")
    memory = estimate(plan, find_gpu("h200"))
    p = measure_size(plan.config, plan.model).parameters
    assert memory.held["weights"] == 2 * p
    assert memory.held["optimizer state"] == 8 * p
    assert memory.held["float32 masters"] == 4 * p
    # Rows in a graph of 8; 100 tokens are two pages of 64, a prompt's 10 tokens one page.
    pages = 8 * 2 + 2 * 1 + 1
    assert wanted_cache_bytes(plan) == pages * 64 * (2 * 2 * 2 * 8) * 2
    assert memory.held["KV cache"] == wanted_cache_bytes(plan), "a small cache stays"
    update = memory.phases["update"]["gradients"] + memory.held["captured gradients"]
    assert update == 4 * p


@pytest.mark.slow
def test_offloading_vllm_and_a_reference_change_what_is_held(tiny: Path) -> None:
    gpu = find_gpu("h200")
    plain = make_plan(tiny, 2, 4)
    offloaded = make_plan(tiny, 2, 4, "optimizer.kind=adamw_offloaded")
    assert "optimizer state" not in estimate(offloaded, gpu).held
    vllm = make_plan(tiny, 2, 4, "rollout.engine=vllm")
    weights = estimate(plain, gpu).held["weights"]
    assert estimate(vllm, gpu).phases["rollout"]["vLLM's weights"] == weights
    roles = {"reference": ("frozen", plain.model)}
    assert estimate(dataclasses.replace(plain, roles=roles), gpu).held["reference"] == weights


def test_graphs_are_for_small_passes_without_adapters(tiny: Path) -> None:
    plan = make_plan(tiny, 1, 1)
    size = measure_size(plan.config, plan.model)
    limit = int(2e12 / (6 * size.block))
    assert is_captured(plan, size, limit)
    assert not is_captured(plan, size, limit + 1)
    assert not is_captured(make_plan(tiny, 1, 1, "model.lora.rank=4"), size, 100)


@pytest.mark.slow
def test_largest_settings_fit_and_more_does_not(tiny: Path) -> None:
    plan = make_plan(tiny, 64, 64, "rollout.max_rows=4096", "rollout.max_response_tokens=400")
    gpu = find_gpu("h200", gib=1.15)
    largest = largest_settings(plan, gpu)
    assert set(largest) == {
        "training.token_budget",
        "rollout.samples",
        "rollout.max_response_tokens",
    }
    budget = largest["training.token_budget"]
    for factor, fits in ((1.0, True), (1.1, False)):
        changed = int(factor * budget + 1024 * (factor - 1))
        memory = estimate(plan.changed("training.token_budget", changed), gpu)
        assert (memory.peak <= gpu.usable) == fits


def test_devices_have_names(capsys: Capture) -> None:
    assert find_gpu("H200").usable > find_gpu("h100").usable
    assert find_gpu("h200", 100).usable == 99 * GIB
    with refused("unknown_name", "--device"):
        find_gpu("h20")


def test_other_families_and_experts_are_not_packed(tiny: Path) -> None:
    config = make_config(tiny)
    model = model_config(config.model)
    assert runs_packed(config, model)
    model.model_type = "gpt_oss"
    assert not runs_packed(config, model)


@pytest.mark.slow
def test_a_run_is_planned_for_a_gpu_that_is_not_here(
    tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["doctor", "--fit", "grpo", f"model.path={tiny}", "data.train=arithmetic:1"]
    words += ["data.template=plain", "rollout.max_response_tokens=20", f"runs={tmp_path}"]
    assert main([*words, "--device", "h200"]) == 0
    text = capsys.readouterr().out
    assert "computes on" in text and "h200, bfloat16" in text
    assert "packed, captured as graphs" in text
    assert "largest that fit" in text and "training.token_budget=" in text
    assert "not measured for a GPU that is not here" in text
    assert main([*words, "--device", "h201"]) == 2
    assert main([*words, "--device-gib", "40"]) == 2
    assert main([*words, "cluster=ray"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_only_the_policy_without_its_adapters_needs_no_weights_of_its_own(tiny: Path) -> None:
    """A teacher that is the policy's own base model, and one of another path."""
    other = make_tiny(tiny.parent / "other-teacher", seed=1)
    weights: list[int] = []
    for teacher in (tiny, other):
        words = [f"method.teacher={teacher}", "model.lora.rank=4", f"model.path={tiny}"]
        fixed = ["model.device=cuda", "model.dtype=bfloat16", "data.train=arithmetic:2"]
        config = compose_arguments(["distill", *words, *fixed])
        config.training.token_budget = 1024
        roles = local_roles(config, find_method("distill")(config))
        plan = plan_of_settings(config, model_config(config.model), roles)
        weights.append(estimate(plan, find_gpu("h200")).held.get("teacher", 0))
    assert weights[0] == 0 and weights[1] > 0


@pytest.mark.slow
def test_planning_needs_no_triton(tiny: Path) -> None:
    """Triton has no version for macOS; its kernels are declared without it."""
    code = f"""
import sys
sys.modules["triton"] = None
from postgrad.cli.train import compose_arguments
from postgrad.model.load.load import model_config
from postgrad.sizing.simulate import PassSimulation
from postgrad.sizing.workload import Pass
config = compose_arguments(["grpo", "model.path={tiny}", "model.device=cuda",
    "model.dtype=bfloat16", "data.train=arithmetic:2"])
model = model_config(config.model)
print(PassSimulation(config, model, packed=True).run(Pass(1024, 512)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = make_config(tiny)
    expected = PassSimulation(config, model_config(config.model), packed=True).run(Pass(1024, 512))
    assert done.stdout.strip() == str(expected)


def test_meta_tensors_stand_for_a_gpu() -> None:
    from postgrad.model.device import has_float32_accumulation, supports_triton

    assert has_float32_accumulation(torch.device("meta"))
    assert not supports_triton(torch.device("meta"))
