"""Memory per device of a mesh: what ranks hold, and what the doctor says about it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import SumOfLogprobs, save_family
from parallel import needs_experts
from ranks import run_on_ranks
from tiny_runs import config_of, random_batch
from transformers import LlamaConfig, Qwen2Config

from postgrad.cli.main import main
from postgrad.doctor.mesh import MeshEstimator
from postgrad.model.load import load, model_config
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.ranks import Ranks
from postgrad.model.sharded import ShardedPolicy
from postgrad.model.views import FULL
from postgrad.sizing.mesh_memory import MeshSizes, count_parameters, estimate_mesh

CPU = torch.device("cpu")
MESHES = [
    [],
    ["cluster.tensor_parallel=2"],
    ["cluster.sequence_parallel=2"],
    ["cluster.shard_workers=2"],
    ["cluster.tensor_parallel=2", "cluster.shard_workers=1"],
    ["cluster.expert_parallel=2"],
]


def make_config(folder, mesh):
    return config_of("grpo", folder, "cluster=ray", "cluster.workers=4", *mesh)


def held_bytes(folder) -> list[int]:
    """Return the bytes of weights, gradients and Adam state that this rank holds, by mesh."""
    sizes: list[int] = []
    for mesh in MESHES:
        config = make_config(folder, mesh)
        ranks = Ranks.from_process_group(CPU, config.cluster)
        policy = ShardedPolicy(config, load(config.model, CPU), SumOfLogprobs(), ranks)
        policy.accumulate(random_batch(1), FULL, MetricAccumulator())
        assert policy.optimizer.has_gradients()
        gradients = sum(m.grad.nbytes for m in policy.optimizer.masters.values())
        policy.optimizer.step(1e-3)
        weights = sum(m.nbytes for m in policy.optimizer.masters.values())
        state = [v for s in policy.optimizer.adam.state.values() for v in s.values()]
        sizes.append(weights + gradients + sum(v.nbytes for v in state if v.dim()))
    return sizes


@needs_experts
@pytest.mark.slow
def test_ranks_hold_what_the_formula_says(tmp_path):
    folder = save_family(tmp_path / "qwen3_moe", "qwen3_moe")
    by_rank = run_on_ranks(4, held_bytes, folder)
    for index, mesh in enumerate(MESHES):
        config = make_config(folder, mesh)
        memory = estimate_mesh(config, model_config(config.model))
        expected = memory.parts["weights, Adam, gradients"]
        mean = sum(sizes[index] for sizes in by_rank) / 4
        assert mean == pytest.approx(expected, rel=0.01), mesh


def test_slices_and_shards_divide_the_memory(tiny):
    config = make_config(tiny, [])
    model = model_config(config.model)
    whole = count_parameters(config, model)
    sliced = count_parameters(make_config(tiny, ["cluster.tensor_parallel=2"]), model)
    assert sliced.outside_blocks < 0.6 * whole.outside_blocks
    assert sliced.largest_block < 0.6 * whole.largest_block
    one = replace(config, cluster=replace(config.cluster, workers=1))
    state = "weights, Adam, gradients"
    assert estimate_mesh(one, model).parts[state] == 16 * whole.parameters
    assert estimate_mesh(config, model).parts[state] == 4 * whole.parameters
    divided = make_config(tiny, ["cluster.sequence_parallel=2"])
    half = estimate_mesh(config, model).parts["activations"] / 2
    assert estimate_mesh(divided, model).parts["activations"] == pytest.approx(half)


def test_proposals_fit_and_begin_with_the_least_communication(tiny):
    config = make_config(tiny, [])
    model = model_config(config.model)
    estimator = MeshEstimator(config, model, {})
    clusters = [proposal.cluster for proposal in estimator.propose(2**40)]
    sizes = [(cluster.tensor_parallel, cluster.sequence_parallel) for cluster in clusters]
    assert sizes == [(1, 1), (2, 1), (1, 2)]
    assert estimator.propose(1000) == []


@needs_experts
@pytest.mark.slow
def test_workers_compute_with_their_own_experts(tmp_path):
    folder = save_family(tmp_path / "qwen3_moe", "qwen3_moe")
    config = make_config(folder, [])
    model = model_config(config.model)
    whole = count_parameters(config, model)
    own = count_parameters(make_config(folder, ["cluster.expert_parallel=4"]), model)
    assert own.parameters == whole.parameters
    experts = model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    assert whole.largest_block - own.largest_block == experts * 3 // 4
    assert own.outside_blocks == whole.outside_blocks


# Of Qwen2.5 and Llama 3: hidden and intermediate size, blocks, heads, key heads, vocabulary, tied.
SHAPES = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "70B": (8192, 28_672, 80, 64, 8, 128_256, False),
}


def make_shape(name: str):
    hidden, intermediate, blocks, heads, key_heads, vocabulary, tied = SHAPES[name]
    make = LlamaConfig if name == "70B" else Qwen2Config
    return make(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_formulas_give(tiny):
    """Columns: model, N, state, gathered and in flight, activations, head, trainer, with engine."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    rows = page.split("| model | N | state |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 8
    models = {name: make_shape(name) for name in SHAPES}
    sizes = MeshSizes()
    for row in rows:
        name, workers, *shown = [cell.strip(" *") for cell in row.strip("|").split("|")]
        config = make_config(tiny, ["model.dtype=bfloat16", "training.token_budget=16384"])
        config.model.activation_checkpointing = True
        config.cluster.workers = int(workers)
        parts = estimate_mesh(config, models[name], sizes=sizes).parts
        beside = parts.pop("engine beside")
        moved = parts["gathered weights"] + parts["gradients in flight"]
        trainer = sum(parts.values())
        state = parts["weights, Adam, gradients"]
        by_column = (state, moved, parts["activations"], parts["head"], trainer, trainer + beside)
        for cell, nbytes in zip(shown, by_column, strict=False):
            assert float(cell) == pytest.approx(nbytes / 1e9, abs=0.051), (row, cell)


def test_other_models_count(tiny):
    config = make_config(tiny, [])
    model = model_config(config.model)
    whole = count_parameters(config, model).parameters
    roles = {"reference": ("frozen", model), "critic": ("critic", model), "judge": ("chat", model)}
    parts = estimate_mesh(config, model, roles).parts
    each = 4  # float32
    assert parts["reference"] == each * whole // 4
    assert parts["critic"] == 16 * whole // 4
    assert parts["judge"] == each * whole
    config.cluster.pools["critic"] = 2
    assert "critic" not in estimate_mesh(config, model, roles).parts


@pytest.mark.slow
def test_base_weights_of_adapters_have_no_optimizer_state(tiny):
    adapted = make_config(tiny, ["model.lora.rank=2"])
    model = model_config(adapted.model)
    whole = count_parameters(make_config(tiny, []), model).parameters
    counts = count_parameters(adapted, model)
    assert counts.parameters - counts.trained == whole
    state = estimate_mesh(adapted, model).parts["weights, Adam, gradients"]
    assert state == (16 * counts.trained + 4 * whole) // 4


def fit_words(folder, *more: str) -> list[str]:
    settings = [f"model.path={folder}", "data.train=arithmetic:1", "cluster=ray"]
    return ["doctor", "--fit", "grpo", *settings, "cluster.workers=8", *more]


def test_the_doctor_shows_the_mesh(tiny, capsys, monkeypatch):
    monkeypatch.setattr("postgrad.training.prepare.probe_threads", None)  # measures this machine
    assert main(fit_words(tiny, "cluster.tensor_parallel=2", "cluster.shard_workers=2")) == 0
    shown = capsys.readouterr().out
    assert "data 4 x sequence 1 x tensor 2, a copy of the weights per 4" in shown
    assert "fits" in shown
    assert "--device h200" in shown
    assert main(fit_words(tiny, "--device-gib", "0.5")) == 0
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "cluster.engines" in shown
    assert main(fit_words(tiny, "cluster.tensor_parallel=3")) == 2


def test_the_doctor_shows_the_time_of_a_step(tiny, capsys):
    assert main(fit_words(tiny, "cluster.tensor_parallel=2", "--device", "h200", "--json")) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    time = values["time"]
    assert time["total"] == pytest.approx(sum(time["stages"].values()))
    assert {"computation", "sharding", "tensor", "optimizer"} == time["update"].keys()
    fastest = values["proposals"][0]
    assert fastest["step_s"] == min(proposal["step_s"] for proposal in values["proposals"])
    assert fastest["step_s"] <= time["total"]
    assert main(fit_words(tiny, "cluster.tensor_parallel=2", "--device", "h200")) == 0
    shown = capsys.readouterr().out
    assert f"{time['total']:.2f} s with 8 x h200" in shown
    assert f"{values['links']['network'] / 1e9:g} GB/s between nodes" in shown
