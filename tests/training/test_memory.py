"""Out of memory is one line that names the stage, what holds the memory and what to set."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import config_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.cluster.host import build_host
from postgrad.config.stored import read_stored_config
from postgrad.errors import RunError
from postgrad.model.device import other_processes_bytes
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training import memory
from postgrad.training.memory import explain, explained_memory_errors

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 1.20 GiB is free.\nSee documentation for Memory Management"
)
CPU_TEXT = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
GPU = torch.OutOfMemoryError(CUDA_TEXT)
HELD = ["weights", "optimizer state", "gradients"]
UPDATE = ["step 1, stage update: out of memory", *HELD, "model.activation_checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name", "error", "parts"),
    [
        (LocalPolicy, "accumulate", GPU, [*UPDATE, "2.50 GiB more"]),
        (LocalPolicy, "accumulate", RuntimeError(CPU_TEXT), UPDATE),
        (NativeEngine, "generate", GPU, ["step 1, stage sample", "rollout.cache_gib"]),
        (LocalPolicy, "save", GPU, ["out of memory while the checkpoint was written for 2.50 GiB"]),
    ],
)
def test_the_line_names_the_stage_and_settings(
    target, name, error, parts, tiny, tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise error

    # The numeric gate samples too, while the model is loaded, unless its verdict is cached.
    monkeypatch.setattr("postgrad.rollout.native.gate.decode_problem", lambda *_: "")
    monkeypatch.setattr(target, name, fail)
    settings = overrides_of(tiny, *toy_run(steps=1), "rollout.engine=native", f"runs={tmp_path}")
    assert main(["train", "grpo", *settings]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in parts), line


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "stored"), [("seed=1", 4096), ("training.token_budget=8", 8)])
def test_an_automatic_token_budget_is_halved_for_the_same_command(
    setting, stored, tiny, tmp_path, monkeypatch, capsys
):
    real = LocalPolicy.accumulate
    budgets = []

    def fail_once(policy, *arguments, **options):
        budgets.append(policy.config.training.token_budget)
        if len(budgets) == 1:
            raise GPU
        return real(policy, *arguments, **options)

    monkeypatch.setattr(LocalPolicy, "accumulate", fail_once)
    settings = overrides_of(tiny, *toy_run(steps=1), setting, f"runs={tmp_path}", "name=run")
    assert main(["train", "grpo", *settings]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert ("then continues with training.token_budget=4096" in line) == (stored == 4096)
    assert read_stored_config(tmp_path / "run")["training"]["token_budget"] == stored
    assert main(["train", "grpo", *settings]) == 0
    assert budgets[-1] == stored


def test_smaller_passes_are_the_advice_where_blocks_are_recomputed(tiny):
    host = build_host(config_of("grpo", tiny, "model.activation_checkpointing=true"))
    advice = explain("update", CUDA_TEXT, host.policy)
    assert "training.token_budget" in advice and "model.activation_checkpointing" not in advice
    assert "rollout.cache_gib" in explain("sample", CUDA_TEXT, host.policy)


@pytest.mark.parametrize(
    ("free", "reserved", "others"),
    [(1, 40, 98), (60, 66, 13), (98, 45, 0)],  # 13 GiB are below a tenth of 139
)
def test_memory_of_other_processes_is_named_first(tiny, monkeypatch, free, reserved, others):
    policy = build_host(config_of("grpo", tiny)).policy
    gib = 2**30
    fake_gpu = SimpleNamespace(
        mem_get_info=lambda device: (free * gib, 139 * gib),
        memory_reserved=lambda device: reserved * gib,
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: fake_gpu)
        assert other_processes_bytes(torch.device("cuda")) == others * gib
        assert other_processes_bytes(torch.device("cpu")) == 0
    monkeypatch.setattr(memory, "other_processes_bytes", lambda device: others * gib)
    monkeypatch.setattr(memory, "total_memory_bytes", lambda device: 139 * gib)
    line = explain("update", CUDA_TEXT, policy)
    named = "other processes hold 98.0 of the GPU's 139.0 GiB"
    assert (named in line) == ("CUDA_VISIBLE_DEVICES; otherwise set" in line) == (others == 98)
    assert line.index("model.activation_checkpointing") > line.find(named)


def test_memory_that_runs_out_in_a_capture_is_one_line():
    """Ending the capture of a graph fails with another error, which hides the first one."""
    line = r"out of memory for 2\.50 GiB more"
    with pytest.raises(RunError, match=line), explained_memory_errors("update"):
        try:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
    for text in ("Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
        with pytest.raises(RunError, match="out of memory"), explained_memory_errors("update"):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), explained_memory_errors("update"):
        raise RuntimeError("shape mismatch")
