"""Memory and time of a run on a GPU, computed without one: by hand and against the trainer."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from postgrad.cli.main import main
from postgrad.cli.train import compose_arguments
from postgrad.config.schema import Config
from postgrad.doctor.workload import read_workload
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.model.load.load import model_config
from postgrad.model.load.tiny import make_tiny
from postgrad.model.passes.layout import make_packed_micro_batches, make_padded_micro_batches
from postgrad.sizing.choose import plan_of_settings
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.gpu_memory import GpuEstimator, is_captured, wanted_cache_bytes
from postgrad.sizing.largest import largest_settings
from postgrad.sizing.memory import optimizer_working_bytes, state_bytes
from postgrad.sizing.packed import PackedSimulation, runs_packed
from postgrad.sizing.plan import GroupLengths, Plan, Workload, pack_groups, pad_groups
from postgrad.sizing.simulate import measure_size
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


@pytest.mark.parametrize("budget", [10, 64, 100, 1000])
def test_packed_passes_are_those_of_the_trainer(budget: int) -> None:
    groups = [GroupLengths(11, (3, 40), 2), GroupLengths(5, (), 3), GroupLengths(7, (0, 9), 0)]
    rows: list[Trajectory] = []
    for number, group in enumerate(groups):
        for length in group.responses(20):
            # Encoder are in order, because the trainer sorts by them.
            rows.append(Trajectory(str(number), [number] * group.prompt, [0] * length, number))
    passes = make_packed_micro_batches(Batch.of(rows), budget)
    expected = [(micro.num_tokens, len(micro.gather)) for micro in passes]
    assert pack_groups(groups, 20, budget) == expected


@pytest.mark.parametrize("budget", [40, 64, 100, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_the_rows_of_a_pair_are_in_one_pass(budget: int, padded: bool) -> None:
    groups = [GroupLengths(11, lengths, 0, 2) for lengths in ((3, 40), (20, 20), (9, 1))]
    rows: list[Trajectory] = []
    for number, group in enumerate(groups):
        for length in group.given:
            rows.append(Trajectory(str(number), [number] * 11, [0] * length, number))
    batch = Batch.of(rows)
    pairs = batch.rows["group"].tolist()
    if padded:
        expected = make_padded_micro_batches(batch, budget, 32, pairs)
        plan = SimpleNamespace(token_budget=budget, width=32)
        found = [(m.num_tokens, len(m.gather)) for m in pad_groups(plan, groups, 1)[0]]
    else:
        expected = make_packed_micro_batches(batch, budget, pairs)
        found = pack_groups(groups, 1, budget)
    assert found == [(micro.num_tokens, len(micro.gather)) for micro in expected]


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
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it samples then. A small cache stays in any case."""
    estimator = GpuEstimator(find_gpu("h200"))
    apart = make_plan(tiny, 2, 4, "cluster.backend=process", "cluster.engine_apart=true")
    stale = dataclasses.replace(apart.config.rollout, staleness=1)
    ahead = dataclasses.replace(apart, config=dataclasses.replace(apart.config, rollout=stale))
    small = estimator.estimate(apart)
    assert "rollout" not in small.phases
    monkeypatch.setattr("postgrad.sizing.gpu_memory.KEPT_CACHE_BYTES", 0)
    cache = wanted_cache_bytes(apart)
    large = estimator.estimate(apart)
    assert large.phases["rollout"] == {"KV cache": cache}
    assert large.held["engine process"] == small.held["engine process"] - cache
    assert estimator.estimate(ahead).held == small.held


def test_a_block_keeps_what_its_kernels_save(tiny: Path) -> None:
    """Width 32, heads of 8: 4 of queries, 2 of keys; 64 wide inside; two blocks; bfloat16."""
    config = make_config(tiny)
    simulation = PackedSimulation(config, model_config(config.model))
    tokens = 4096
    queries, keys = 4 * 8, 2 * 8
    residuals = 2 * 32  # before attention and before the MLP
    normed = 2 * 32
    inputs_of_norms = queries + keys
    attention = queries + 2 * keys + queries  # q, k, v and the output
    block = 2 * (residuals + normed + inputs_of_norms + attention + 2 * 64)
    block += 4 * (2 + 4 + 2)  # 1 / rms of two norms and of each head's norm, in float32
    block += 4 * 4  # log-sum-exp of each head
    kept = simulation.run(tokens, 1000).kept
    assert kept / tokens == pytest.approx(2 * block, rel=0.2)
    assert simulation.run(2 * tokens, 1000).kept == pytest.approx(2 * kept, rel=0.01)


@pytest.mark.slow
def test_checkpointing_keeps_less_and_lora_trains_less(tiny: Path) -> None:
    model = model_config(make_config(tiny).model)
    full = PackedSimulation(make_config(tiny), model).run(1024, 512)
    checkpointing = make_config(tiny, "model.activation_checkpointing=true")
    checkpointed = PackedSimulation(checkpointing, model).run(1024, 512)
    assert checkpointed.kept < 0.5 * full.kept
    lora = make_config(tiny, "model.lora.rank=4")
    assert measure_size(lora, model).trained < 0.2 * measure_size(lora, model).parameters
    assert PackedSimulation(lora, model).run(1024, 512).kept > full.kept


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
    memory = GpuEstimator(find_gpu("h200")).estimate(plan)
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
    estimator = GpuEstimator(find_gpu("h200"))
    plain = make_plan(tiny, 2, 4)
    offloaded = make_plan(tiny, 2, 4, "optimizer.kind=adamw_offloaded")
    assert "optimizer state" not in estimator.estimate(offloaded).held
    vllm = make_plan(tiny, 2, 4, "rollout.engine=vllm")
    weights = estimator.estimate(plain).held["weights"]
    assert estimator.estimate(vllm).phases["rollout"]["vLLM's weights"] == weights
    roles = {"reference": ("frozen", plain.model)}
    assert estimator.estimate(dataclasses.replace(plain, roles=roles)).held["reference"] == weights


def test_graphs_are_for_small_passes_without_adapters(tiny: Path) -> None:
    config = make_config(tiny)
    size = measure_size(config, model_config(config.model))
    limit = int(2e12 / (6 * size.block))
    assert is_captured(config, size, limit)
    assert not is_captured(config, size, limit + 1)
    assert not is_captured(make_config(tiny, "model.lora.rank=4"), size, 100)


@pytest.mark.slow
def test_largest_settings_fit_and_more_does_not(tiny: Path) -> None:
    plan = make_plan(tiny, 64, 64, "rollout.max_rows=4096", "rollout.max_response_tokens=400")
    gpu = find_gpu("h200", gib=1.15)
    estimator = GpuEstimator(gpu)
    largest = largest_settings(plan, estimator)
    assert set(largest) == {
        "training.token_budget",
        "rollout.samples",
        "rollout.max_response_tokens",
    }
    budget = largest["training.token_budget"]
    for factor, fits in ((1.0, True), (1.1, False)):
        training = dataclasses.replace(
            plan.config.training, token_budget=int(factor * budget + 1024 * (factor - 1))
        )
        config = dataclasses.replace(plan.config, training=training)
        memory = estimator.estimate(dataclasses.replace(plan, config=config))
        assert (memory.peak <= gpu.usable) == fits


def test_devices_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_gpu("H200").memory > find_gpu("h100").memory
    assert find_gpu("h200", 100).memory == 100 * GIB
    with pytest.raises(ConfigError, match="--device h20"):
        find_gpu("h20")


def test_other_families_and_experts_are_not_packed(tiny: Path) -> None:
    config = make_config(tiny)
    model = model_config(config.model)
    assert runs_packed(config, model)
    model.model_type = "gpt_oss"
    assert not runs_packed(config, model)


@pytest.mark.slow
def test_a_run_is_planned_for_a_gpu_that_is_not_here(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--fit", "grpo", f"model.path={tiny}", "data.train=arithmetic:2"]
    words += ["data.template=plain", "rollout.max_response_tokens=20", f"runs={tmp_path}"]
    assert main([*words, "--device", "h200"]) == 0
    text = capsys.readouterr().out
    assert "computes on" in text and "h200, bfloat16" in text
    assert "packed, captured as graphs" in text
    assert "largest that fit" in text and "training.token_budget=" in text
    assert "not estimated on a GPU" in text
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
        weights.append(GpuEstimator(find_gpu("h200")).estimate(plan).held.get("teacher", 0))
    assert weights[0] == 0 and weights[1] > 0


@pytest.mark.slow
def test_planning_needs_no_triton(tiny: Path) -> None:
    """Triton has no version for macOS; its kernels are declared without it."""
    code = f"""
import sys
sys.modules["triton"] = None
from postgrad.cli.train import compose_arguments
from postgrad.model.load.load import model_config
from postgrad.sizing.packed import PackedSimulation
config = compose_arguments(["grpo", "model.path={tiny}", "model.device=cuda",
    "model.dtype=bfloat16", "data.train=arithmetic:2"])
print(PackedSimulation(config, model_config(config.model)).run(1024, 512))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = make_config(tiny)
    expected = PackedSimulation(config, model_config(config.model)).run(1024, 512)
    assert done.stdout.strip() == str(expected)


def test_meta_tensors_stand_for_a_gpu() -> None:
    from postgrad.model.device import has_float32_accumulation, supports_triton

    assert has_float32_accumulation(torch.device("meta"))
    assert not supports_triton(torch.device("meta"))
