"""Ranks that share one GPU give the numbers of one process on it.

NCCL wants one GPU per rank, so they exchange tensors over gloo, by copies in host memory
(`staged.py`). Run with: python -m pytest -m gpu tests/gpu/test_shared_gpu_ranks.py
"""

import pytest
import torch
from parallel import (
    EXPERT,
    LORA,
    SEQUENCE,
    TENSOR,
    compute,
    difference,
    folder_maker,
    local_policy,
    needs_experts,
    sharded_policy,
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
# Family, changes of its shape, and settings, on four ranks.
CASES = {
    "fsdp": ("qwen3", {}, []),
    "fsdp, state on the host": ("qwen3", {}, ["cluster.offload=true"]),
    "hybrid sharding": ("qwen3", {}, ["cluster.shard_workers=2"]),
    "tensor": ("qwen3", {}, [TENSOR]),
    "tensor, adapters": ("qwen3", {}, [TENSOR, LORA]),
    "tensor, recomputed": ("qwen3", {}, [TENSOR, "model.activation_checkpointing=true"]),
    "sequence": ("qwen3", {}, [SEQUENCE]),
    "sequence, windows": ("gemma3_text", {"num_hidden_layers": 2}, [SEQUENCE]),
    "tensor x sequence": ("qwen3", {"num_key_value_heads": 4}, [TENSOR, SEQUENCE]),
    "experts in slices": ("qwen3_moe", {}, [TENSOR]),
    "whole experts": ("qwen3_moe", {}, [TENSOR, EXPERT]),
}
BFLOAT16 = ("fsdp", "tensor", "sequence")
CASE_PARAMS = [
    pytest.param(name, marks=needs_experts) if EXPERT in case[2] else name
    for name, case in CASES.items()
]


def on_host(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in results.items()}


def results_on_ranks(cases) -> list[dict[str, torch.Tensor] | str]:
    """Return the results of every case on this rank, or why it failed."""
    torch.cuda.set_device(CUDA)
    results: list[dict[str, torch.Tensor] | str] = []
    for folder, settings in cases:
        try:
            policy = sharded_policy(folder, settings, device=CUDA)
            results.append(on_host(compute(policy)))
        except Exception as error:  # the other cases are still worth running
            results.append(f"{type(error).__name__}: {error}")
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def on_four_ranks(folders):
    """Every case's results by rank, in float32 and then some in bfloat16."""
    cases = [
        (folders(family, changes), ["model.dtype=float32", *settings])
        for family, changes, settings in CASES.values()
    ]
    for name in BFLOAT16:
        family, changes, settings = CASES[name]
        cases.append((folders(family, changes), ["model.dtype=bfloat16", *settings]))
    return run_on_ranks(4, results_on_ranks, cases, start="spawn", backend="staged")


@pytest.mark.parametrize("name", CASE_PARAMS)
def test_four_ranks_on_one_gpu_give_the_numbers_of_one_process(name, folders, on_four_ranks):
    family, changes, settings = CASES[name]
    folder = folders(family, changes)
    expected = compute(local_policy(folder, ["model.dtype=float32", *settings], device=CUDA))
    for rank, results in enumerate(on_four_ranks):
        actual = results[list(CASES).index(name)]
        assert not isinstance(actual, str), f"rank {rank}: {actual}"
        assert not difference(on_host(expected), actual), f"rank {rank}"


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_ranks_round_as_one_process_does(name, folders, on_four_ranks):
    """Their log-probs are as far from float32 as those of one process in bfloat16."""
    family, changes, settings = CASES[name]
    folder = folders(family, changes)
    exact, rounded = (
        on_host(compute(local_policy(folder, [f"model.dtype={dtype}", *settings], device=CUDA)))
        for dtype in ("float32", "bfloat16")
    )
    own_error = (rounded["logprobs"] - exact["logprobs"]).abs().max()
    for rank, results in enumerate(on_four_ranks):
        actual = results[len(CASES) + BFLOAT16.index(name)]
        assert not isinstance(actual, str), f"rank {rank}: {actual}"
        assert (actual["logprobs"] - exact["logprobs"]).abs().max() < 3 * own_error, f"rank {rank}"


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_rank_on_ray_follows_the_local_run(recipe, tiny, tmp_path):
    """One rank has the GPU: FSDP2, NCCL and the engine beside it, as every rank of a cluster."""
    pytest.importorskip("ray")
    verifier = tmp_path / "graded.py"
    verifier.write_text("def graded(response, problem):\n    return sum(map(ord, response)) % 11\n")
    both = []
    for name, where in (("local", []), ("ray", ["cluster=ray", "cluster.workers=1"])):
        words = [
            *toy_run(steps=3, response_tokens=8),
            *where,
            f"model.device={CUDA.type}",
            "model.dtype=float32",
            "optimizer.lr=1e-3",
            f"reward.verifier={verifier}:graded",
            f"runs={tmp_path}",
            f"name={name}",
        ]
        result = train(config_of(recipe, tiny, *words), Reporter())
        both.append([line for line in metrics_of(result.folder) if "loss" in line])
    local, on_ray = both
    assert len(local) == len(on_ray) == 3
    for expected, actual in zip(local, on_ray, strict=True):
        for metric in ("loss", "grad_norm", "reward/mean"):
            if metric in expected:
                assert actual[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-5)
