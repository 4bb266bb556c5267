"""The estimate of `postgrad doctor --fit`: by hand, against real tensors, against a real run."""

import json
import re
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch

from postgrad.cli.train import compose_arguments
from postgrad.config.schema import Config
from postgrad.doctor import fit
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import load, model_config
from postgrad.model.load.tiny import make_tiny
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.passes.row_attention import make_padded_segments
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.views import hidden_states
from postgrad.sizing import simulate
from postgrad.sizing.choose import suggest_settings
from postgrad.sizing.devices import Device
from postgrad.sizing.memory import estimate
from postgrad.sizing.workload import GroupLengths, Pass, Plan, Row, Workload, lay_out_step
from postgrad.types import Batch, Trajectory

GIB = 2**30
HERE = Device("cpu", 8 * GIB)


def make_config(model: Path, *overrides: str) -> Config:
    fixed = [
        "model.device=cpu",
        "model.dtype=float32",
        "model.threads=1",
        "data.train=arithmetic:1",
    ]
    return compose_arguments(["grpo", f"model.path={model}", *fixed, *overrides])


def make_workload(
    groups: int, prompt: int, samples: int, given: tuple[int, ...] = (), num_validation: int = 0
) -> Workload:
    return Workload([GroupLengths(prompt, given, samples)] * groups, prompt, num_validation)


def make_plan(workload: Workload, model: Path, *overrides: str) -> Plan:
    config = make_config(model, *overrides)
    return Plan(config, model_config(config.model), workload)


# ---- by hand


def test_size_counts_the_parameters_of_the_model(tiny: Path) -> None:
    config = make_config(tiny)
    size = simulate.measure_size(config, model_config(config.model))
    # Width 32, vocabulary 18 (tied), 4 heads and 2 key heads of 8: q and o 32x32, k and v 32x16,
    # mlp 3 x 32x64; norms 32 + 32 + 8 + 8 per block, 32 at the end.
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 8
    assert size.parameters == 18 * 32 + 2 * block + 32
    assert (size.blocks, size.vocabulary, size.weights, size.largest) == (
        2,
        18,
        4 * size.parameters,
        64 * 32,
    )


@pytest.mark.slow
def test_tied_heads_count_once(tiny: Path, tiny_untied: Path) -> None:
    sizes = [
        simulate.measure_size(make_config(path), model_config(make_config(path).model))
        for path in (tiny, tiny_untied)
    ]
    block = (sizes[0].parameters - 18 * 32 - 32) // 2
    assert sizes[1].parameters == 2 * 18 * 32 + 3 * block + 32


@pytest.mark.parametrize(
    ("overrides", "each"),
    [
        (["model.dtype=float32"], 4 + 8),
        (["model.dtype=bfloat16"], 2 + 12),
        (["model.dtype=bfloat16", "optimizer.kind=adamw_offloaded"], 2 + 12),
        (["model.dtype=bfloat16", "optimizer.kind=adamw_8bit"], 2 + 6),
    ],
)
def test_checkpoint_and_disk(tiny: Path, overrides: list[str], each: int) -> None:
    steps = ["training.steps=100", "training.checkpoint_every=10", "training.keep_checkpoints=2"]
    plan = make_plan(make_workload(2, 10, 2), tiny, *overrides, *steps)
    one = each * simulate.measure_size(plan.config, plan.model).parameters
    assert fit.checkpoint_bytes(plan) == one
    layout = lay_out_step(plan)
    rollouts = 100 * layout.tokens * fit.ROLLOUT_BYTES
    assert fit.disk_bytes(plan, layout) == 3 * one + rollouts
    plan.config.training.keep_best, plan.config.training.validate_every = "held", 50
    assert fit.disk_bytes(plan, layout) == 4 * one + rollouts, (
        "the best one is kept beside the newest"
    )
    plan.config.training.keep_best = ""
    plan.config.training.checkpoint_every = 100
    assert fit.disk_bytes(plan, layout) == one + rollouts


# ---- memory against real tensors


def test_live_bytes_count_tensors_and_not_views() -> None:
    weight = torch.zeros(1000)
    with simulate.LiveBytes([weight]) as count:
        a = weight * 2
        b = a.view(10, 100) + 1
        weight.add_(1)
        assert count.now == 8000
        del a
        assert (count.now, count.peak) == (4000, 8000)
        del b
    assert (count.now, count.peak) == (0, 8000)


PASS = Pass(2 * (19 + 3 * 24), 6 * 24, tuple(Row(i // 3, 20, 24, i) for i in range(6)))


def micro_batch_of(one: Pass):
    """Two prompts of 20 tokens with three responses of 24 each, as the trainer packs them."""
    rows = [
        Trajectory("", [row.problem] * row.prompt, [0] * row.response, row.problem)
        for row in one.rows
    ]
    (micro,) = make_packed_micro_batches(Batch.of(rows), 1000, None, make_padded_segments)
    assert (micro.num_tokens, len(micro.gather)) == (one.tokens, one.response_tokens)
    return micro


def make_policy(config: Config) -> LocalPolicy:
    model = load(config.model, torch.device("cpu")).model
    return LocalPolicy(config, Loaded(model, None), simulate.NO_OBJECTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simulated_activations_are_those_that_autograd_keeps(tiny_untied: Path, dtype: str) -> None:
    """The saved tensors of a real model of three blocks, against one and two simulated blocks."""
    config = make_config(tiny_untied, f"model.dtype={dtype}")
    simulation = simulate.PassSimulation(config, model_config(config.model), packed=False)
    policy = make_policy(config)
    micro = micro_batch_of(PASS)
    known = [*policy.model.parameters()]
    packing: Any = micro.packing
    tables = (vars(packing) | vars(packing.groups[0])).values()
    known += [table for table in tables if isinstance(table, torch.Tensor)]
    existing = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in existing:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = (policy.model, micro.ids, micro.positions, None, FULL, micro.packing)
        hidden = hidden_states(*states)
    assert hidden.requires_grad
    assert simulation.run(PASS).kept == pytest.approx(sum(kept.values()), rel=0.05)


@pytest.mark.slow
def test_simulated_peak_is_that_of_the_real_pass(tiny_untied: Path) -> None:
    config = make_config(tiny_untied)
    simulated = simulate.PassSimulation(config, model_config(config.model), packed=False).run(PASS)
    policy = make_policy(config)
    for master in policy.optimizer.masters.values():
        master.grad = torch.zeros_like(master)
    micro = micro_batch_of(PASS)
    with simulate.LiveBytes(simulate.existing_tensors(policy)) as count:
        policy.forward(micro, micro.gather % 18, FULL).logprobs.sum().backward()
    assert simulated.peak == pytest.approx(count.peak, rel=0.05)


@pytest.mark.nightly
def test_checkpointing_and_a_smaller_budget_need_less_memory(tiny_untied: Path) -> None:
    peaks = {}
    for overrides in ((), ("model.activation_checkpointing=true",), ("training.token_budget=100",)):
        plan = make_plan(
            make_workload(8, 20, 4), tiny_untied, "rollout.max_response_tokens=20", *overrides
        )
        peaks[overrides] = estimate(plan, HERE).phases["update"]["activations"]
    assert peaks[("model.activation_checkpointing=true",)] < 0.5 * peaks[()]
    assert peaks[("training.token_budget=100",)] < 0.25 * peaks[()]


@pytest.fixture(scope="module")
def tiny64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks whose rows are whole blocks of 64 weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny64"
    return make_tiny(folder, seed=0, layers=4, width=64)


@pytest.mark.slow
def test_weights_in_4_bits_by_hand(tiny64: Path) -> None:
    """Width 64, MLP 128, heads 4 and 2 of 16: 7 matrices per block in 4.5 bits, others float32."""
    pytest.importorskip("peft")
    plan = make_plan(
        make_workload(2, 10, 2), tiny64, "model.lora.rank=2", "model.quantization=4bit"
    )
    size = simulate.measure_size(plan.config, plan.model)
    matrices = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    adapters = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    others = 4 * (2 * 64 + 2 * 16) + 64 + 18 * 64  # norms and the tied embedding
    assert size.trained == 4 * adapters
    assert size.parameters == 4 * (matrices + adapters) + others
    assert size.weights == 4 * matrices * 4.5 / 8 + 4 * (4 * adapters + others)


@pytest.mark.nightly
def test_4_bits_need_less_memory(tiny64: Path) -> None:
    pytest.importorskip("peft")
    checkpointing = "model.activation_checkpointing=true"
    held: dict[str, int] = {}
    for setting in ("seed=1", "model.quantization=4bit"):
        lora = ("model.lora.rank=2", checkpointing, setting)
        plan = make_plan(make_workload(8, 20, 4), tiny64, "rollout.max_response_tokens=20", *lora)
        memory = estimate(plan, HERE)
        held[setting] = memory.held["weights"]
        suggested = dict(suggest_settings(plan, HERE))
        assert ("model.quantization=4bit" in suggested) == (setting == "seed=1")
    assert held["model.quantization=4bit"] < 0.5 * held["seed=1"]


@pytest.mark.slow
def test_memory_by_hand(tiny: Path) -> None:
    overrides = [
        "rollout.max_response_tokens=20",
        "model.dtype=bfloat16",
        "rollout.max_rows=6",
        "training.steps=1",
    ]
    plan = make_plan(make_workload(2, 10, 4), tiny, *overrides)
    memory = estimate(plan, Device("cpu", 8 * GIB, process=5000, kernel=7))
    p = simulate.measure_size(plan.config, plan.model).parameters
    state = {"process": 5000, "weights": 2 * p, "optimizer state": 8 * p, "float32 masters": 4 * p}
    assert {name: memory.held[name] for name in state} == state
    # Matrices of five shapes (embedding; q and o; k and v; gate and up; down), six row counts,
    # and one pass of three products.
    assert memory.held["kernels by shape"] == 7 * 5 * (6 + 3)
    # Six rows of 30 tokens; keys and values of two heads of 8 in two blocks, two bytes each.
    assert memory.phases["rollout"]["KV cache"] == 6 * 30 * 2 * 2 * 8 * 2 * 2
    assert memory.phases["optimizer step"]["gradients"] == 4 * p
    assert memory.peak == sum(memory.held.values()) + max(
        sum(phase.values()) for phase in memory.phases.values()
    )


@pytest.mark.slow
def test_engine_process_counts_its_own_weights(tiny: Path) -> None:
    apart = ["cluster.backend=process", "cluster.engines=1"]
    plans = [
        make_plan(make_workload(2, 10, 4), tiny, *overrides, "rollout.max_response_tokens=20")
        for overrides in ([], apart)
    ]
    device = Device("cpu", 8 * GIB, process=10**6)
    one, two = (estimate(plan, device) for plan in plans)
    rollout = sum(n for name, n in one.phases["rollout"].items() if name != "heap slack")
    assert two.held["engine process"] == 10**6 + one.held["weights"]
    assert two.held["driver process"] == 10**6
    assert two.phases["rollout"] == one.phases["rollout"]
    ahead = estimate(plans[1].changed("rollout.staleness", 1), device)
    assert ahead.held["engine process"] == two.held["engine process"] + rollout
    assert "rollout" not in ahead.phases, "the engine samples while the trainer works"


@pytest.mark.nightly
def test_suggestions_come_in_the_order_of_effect(tiny_untied: Path) -> None:
    plan = make_plan(
        make_workload(32, 20, 8),
        tiny_untied,
        "rollout.max_response_tokens=50",
        "training.token_budget=4096",
    )
    suggestions = suggest_settings(plan, HERE)
    savings = [saved for _, saved in suggestions]
    assert savings == sorted(savings, reverse=True)
    assert savings[-1] > 0
    assert {"training.token_budget=2048", "model.activation_checkpointing=true"} <= {
        setting for setting, _ in suggestions
    }


# ---- against a real run


def postgrad(*arguments: str) -> str:
    """Run the command in its own process with one thread; return what it prints."""
    done = preloaded.run(preloaded.COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gib_of(name: str, text: str) -> float:
    """Return the GiB in the row `name` of the printed report."""
    found = re.search(rf"{name} +([\d.]+) GiB", text)
    assert found, text
    return float(found[1])


def model_that_rarely_stops(folder: Path) -> Path:
    """19M parameters and a vocabulary of 1024: the end is rare, so responses have full length."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from postgrad.model.load.tiny import make_tiny

    make_tiny(folder, seed=0, layers=8, width=512, heads=8)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 1024
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_estimates_are_those_of_a_real_run(tmp_path: Path, dtype: str) -> None:
    """Memory and disk; the time depends on the load of the machine."""
    verifier = tmp_path / "coin.py"
    verifier.write_text(
        "def coin(response, problem):\n    return float(sum(map(ord, response)) % 2)\n"
    )
    arguments = [
        "grpo",
        f"model.path={model_that_rarely_stops(tmp_path / 'model')}",
        f"model.dtype={dtype}",
        "model.threads=1",
        "data.train=arithmetic:1",
        "data.template=plain",
        f"reward.verifier={verifier}:coin",
        "rollout.max_response_tokens=24",
        "training.problems_per_step=8",
        "training.steps=1",
        f"runs={tmp_path}/runs",
        "name=real",
    ]
    estimate = postgrad("doctor", "--fit", *arguments)
    assert not (tmp_path / "runs").exists()
    postgrad("train", *arguments)
    run = tmp_path / "runs" / "real"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    peak = max(line["memory_gib"] for line in lines)
    assert peak / 1.5 < gib_of("peak memory", estimate) < peak * 1.5
    files = [file for file in (run / "checkpoints" / "step-1").rglob("*") if file.is_file()]
    saved = sum(file.stat().st_size for file in files)
    assert gib_of("checkpoint", estimate) * GIB == pytest.approx(saved, rel=0.1)
