"""Ranks that share one GPU give the numbers of one process on it.

NCCL wants one GPU per rank, so they exchange tensors over gloo, by copies in host memory
(`staged.py`). Run with: make test-gpu
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import (
    EXPERT,
    HAS_EXPERTS,
    LORA,
    SEQUENCE,
    TENSOR,
    compute_critic,
    compute_with_step,
    difference,
    folder_maker,
    local_critic,
    local_policy,
    needs_experts,
    rank_critic,
    rank_policy,
    sharded_policy,
    step_on_first_block,
)
from ranks import run_on_ranks
from tiny_runs import config_of, metrics_of, toy_run

from postgrad.training.driver import train
from postgrad.training.report import Reporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
RANKS = 4
CASES_S = 400.0  # the longest time for all cases
COLLECTIVE_S = 60.0  # the longest wait of a rank for another
ON_HOST = "cluster.offload=true"
RECOMPUTED = "model.activation_checkpointing=true"
FUSED = "optimizer.kind=adamw_fused"
OFFLOADED = "optimizer.kind=adamw_offloaded"
GEMMA = {"num_hidden_layers": 2}
FOUR_HEADS = {"num_key_value_heads": 4}
# Family, changes of its shape, and settings, on four ranks.
CASES = {
    "fsdp": ("qwen3", {}, []),
    "fsdp, state on the host": ("qwen3", {}, [ON_HOST]),
    "fsdp, adapters": ("qwen3", {}, [LORA]),
    "fsdp, adapters, recomputed": ("qwen3", {}, [LORA, RECOMPUTED]),
    "fsdp, fused optimizer": ("qwen3", {}, [FUSED]),
    "fsdp, offloaded optimizer": ("qwen3", {}, [OFFLOADED]),
    "hybrid sharding": ("qwen3", {}, ["cluster.shard_workers=2"]),
    "tensor": ("qwen3", {}, [TENSOR]),
    "tensor, fused optimizer": ("qwen3", {}, [TENSOR, FUSED]),
    "tensor, state on the host": ("qwen3", {}, [TENSOR, ON_HOST]),
    "tensor, adapters": ("qwen3", {}, [TENSOR, LORA]),
    "tensor, recomputed": ("qwen3", {}, [TENSOR, RECOMPUTED]),
    "tensor, tied": ("gemma3_text", GEMMA, [TENSOR]),
    "tensor, stock modules": ("olmo2", {}, [TENSOR]),
    "sequence": ("qwen3", {}, [SEQUENCE]),
    "sequence, adapters": ("qwen3", {}, [SEQUENCE, LORA]),
    "sequence, recomputed": ("qwen3", {}, [SEQUENCE, RECOMPUTED]),
    "sequence, windows": ("gemma3_text", GEMMA, [SEQUENCE]),
    "sequence, stock modules": ("olmo2", {}, [SEQUENCE]),
    "tensor x sequence": ("qwen3", FOUR_HEADS, [TENSOR, SEQUENCE]),
    "experts in slices": ("qwen3_moe", {}, [TENSOR]),
    "token dispatch": ("qwen3_moe", {}, [EXPERT]),
}
BFLOAT16 = ("fsdp", "tensor", "sequence")
LOADED_ON_GPU = ("fsdp", "tensor", "sequence")  # by each rank; runs load in host memory
CRITICS = ("fsdp", "tensor", "sequence")


def case_params(names) -> list:
    return [
        pytest.param(name, marks=needs_experts) if EXPERT in CASES[name][2] else name
        for name in names
    ]


def on_host(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in results.items()}


def compute_steps(policy) -> dict[str, torch.Tensor]:
    return compute_with_step(policy) | step_on_first_block(policy)


def compute_case(key: str, folder: Path, settings: list[str]) -> dict[str, torch.Tensor]:
    """Return the results of one case on this rank."""
    if key.startswith("critic"):
        return compute_critic(rank_critic(folder, settings, CUDA))
    if key.startswith("loaded on the GPU"):
        return compute_steps(sharded_policy(folder, settings, device=CUDA))
    return compute_steps(rank_policy(folder, settings, CUDA))


def save_results(cases, results: Path) -> None:
    """Write the results of every case on this rank; stop at the first that fails."""
    torch.cuda.set_device(CUDA)
    for number, (key, folder, settings) in enumerate(cases):
        computed = on_host(compute_case(key, folder, settings))
        torch.save(computed, results / f"{number}-{dist.get_rank()}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def on_four_ranks(folders, tmp_path_factory):
    """Every case's results by rank, or why it failed. After a failure the ranks start again."""

    def case(key: str, name: str, dtype: str = "float32"):
        family, changes, settings = CASES[name]
        return f"{key}{name}", folders(family, changes), [f"model.dtype={dtype}", *settings]

    cases = [case("", name) for name in CASES if EXPERT not in CASES[name][2] or HAS_EXPERTS]
    cases += [case("bfloat16, ", name, "bfloat16") for name in BFLOAT16]
    cases += [case("loaded on the GPU, ", name) for name in LOADED_ON_GPU]
    cases += [case("critic, ", name) for name in CRITICS]
    found: dict[str, list[dict[str, torch.Tensor]] | str] = {}
    while cases:
        folder = tmp_path_factory.mktemp("results")
        failure = _run_cases(cases, folder)
        number = 0
        while number < len(cases) and all(file.exists() for file in _files(folder, number)):
            found[cases[number][0]] = [torch.load(file) for file in _files(folder, number)]
            number += 1
        if number < len(cases):
            found[cases[number][0]] = failure
        cases = cases[number + 1 :]
    return found


def _files(folder: Path, number: int) -> list[Path]:
    return [folder / f"{number}-{rank}" for rank in range(RANKS)]


def _run_cases(cases, folder: Path) -> str:
    """Run the cases up to the first that fails; return why it failed, or ""."""
    limits = {"answer_s": CASES_S, "collective_s": COLLECTIVE_S}
    try:
        run_on_ranks(RANKS, save_results, cases, folder, start="spawn", backend="staged", **limits)
    except AssertionError as error:
        return str(error)
    return ""


def check_equal(found, key: str, expected: dict[str, torch.Tensor]) -> None:
    assert not isinstance(found[key], str), found[key]
    for rank, actual in enumerate(found[key]):
        assert not difference(on_host(expected), actual), f"rank {rank}"


@pytest.mark.parametrize("name", case_params(CASES))
def test_four_ranks_on_one_gpu_give_the_numbers_of_one_process(name, folders, on_four_ranks):
    """Also after an optimizer step, and for BuPO's policy after some blocks."""
    family, changes, settings = CASES[name]
    policy = local_policy(folders(family, changes), ["model.dtype=float32", *settings], device=CUDA)
    check_equal(on_four_ranks, name, compute_steps(policy))


@pytest.mark.parametrize("name", LOADED_ON_GPU)
def test_a_model_that_was_loaded_on_the_gpu_is_sharded(name, folders, on_four_ranks):
    """Its kernels multiply whole matrices, which must not be used after sharding."""
    family, changes, settings = CASES[name]
    policy = local_policy(folders(family, changes), ["model.dtype=float32", *settings], device=CUDA)
    check_equal(on_four_ranks, f"loaded on the GPU, {name}", compute_steps(policy))


@pytest.mark.parametrize("name", CRITICS)
def test_critics_on_four_ranks_learn_the_values_of_one_process(name, folders, on_four_ranks):
    family, changes, settings = CASES[name]
    critic = local_critic(folders(family, changes), ["model.dtype=float32", *settings], CUDA)
    check_equal(on_four_ranks, f"critic, {name}", compute_critic(critic))


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_ranks_round_as_one_process_does(name, folders, on_four_ranks):
    """Their log-probs are as far from float32 as those of one process in bfloat16."""
    family, changes, settings = CASES[name]
    make = partial(local_policy, folders(family, changes), device=CUDA)
    exact, rounded = (
        on_host(compute_steps(make([f"model.dtype={dtype}", *settings])))["logprobs"]
        for dtype in ("float32", "bfloat16")
    )
    own_error = (rounded - exact).abs().max()
    found = on_four_ranks[f"bfloat16, {name}"]
    assert not isinstance(found, str), found
    for rank, actual in enumerate(found):
        assert (actual["logprobs"] - exact).abs().max() < 3 * own_error, f"rank {rank}"


RAY_RUNS = {
    "sft": ("sft", []),
    "grpo": ("grpo", []),
    "grpo, adapters, fused optimizer": ("grpo", ["model.lora.rank=4", FUSED]),
    "ppo": ("ppo", ["method.critic_lr=1e-3"]),
    "bupo": ("bupo", ["method.num_blocks=1", "method.phase_one_steps=2"]),
}


@pytest.mark.parametrize("name", RAY_RUNS)
def test_a_rank_on_ray_follows_the_local_run(name, tiny, tmp_path):
    """One rank has the GPU: FSDP2, NCCL and the engine beside it, as every rank of a cluster.

    The local run and the engine may capture graphs; the rank's passes may not.
    """
    recipe, settings = RAY_RUNS[name]
    pytest.importorskip("ray")
    verifier = tmp_path / "graded.py"
    verifier.write_text("def graded(response, problem):\n    return sum(map(ord, response)) % 11\n")
    both = []
    for run, where in (("local", []), ("ray", ["cluster=ray", "cluster.workers=1"])):
        words = [
            *toy_run(steps=3, response_tokens=8),
            *settings,
            *where,
            f"model.device={CUDA.type}",
            "model.dtype=float32",
            "optimizer.lr=1e-3",
            f"reward.verifier={verifier}:graded",
            f"runs={tmp_path}",
            f"name={run}",
        ]
        result = train(config_of(recipe, tiny, *words), Reporter())
        both.append([line for line in metrics_of(result.folder) if "loss" in line])
    local, on_ray = both
    assert len(local) == len(on_ray) == 3
    for expected, actual in zip(local, on_ray, strict=True):
        for metric in ("loss", "grad_norm", "reward/mean"):
            if metric in expected:
                assert actual[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-5)
