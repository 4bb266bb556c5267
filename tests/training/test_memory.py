"""Out of memory is one line that names the stage, what holds the memory and what to set."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import config_of

from postgrad.cli.main import main
from postgrad.cluster.host import build_host
from postgrad.errors import RunError
from postgrad.model.device import other_processes_bytes
from postgrad.model.load.tiny import make_tiny
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training import memory
from postgrad.training.memory import estimated_advice, explain, explained_memory_errors

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 1.20 GiB is free.\nSee documentation for Memory Management"
)
CPU_TEXT = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"


def run_once(tmp_path, monkeypatch, target, name, error, capsys):
    """Train one step in which target.name raises the error; return the exit code and the line."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(target, name, fail)
    code = main(
        ["train", "grpo", f"model.path={make_tiny(tmp_path / 'model', seed=0, layers=1, width=32)}",
         "model.device=cpu", "data.train=arithmetic:1", "data.template=plain",
         "rollout.samples=2", "rollout.max_response_tokens=4", "training.problems_per_step=2",
         "training.steps=1", "rollout.engine=native", f"runs={tmp_path / 'runs'}"]
    )  # fmt: skip
    return code, capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(CUDA_TEXT), RuntimeError(CPU_TEXT)], ids=["gpu", "host"]
)
def test_update_names_weights_state_and_settings(tmp_path, monkeypatch, capsys, error):
    code, line = run_once(tmp_path, monkeypatch, LocalPolicy, "accumulate", error, capsys)
    assert code == 1
    assert "step 1, stage update: out of memory" in line
    assert ("2.50 GiB" in line) == isinstance(error, torch.OutOfMemoryError)
    for part in ("weights", "optimizer state", "gradients", "model.activation_checkpointing"):
        assert part in line


def test_sampling_names_the_cache(tmp_path, monkeypatch, capsys):
    error = torch.OutOfMemoryError(CUDA_TEXT)
    # The numeric gate samples too, while the model is loaded, unless its verdict is cached.
    monkeypatch.setattr("postgrad.rollout.native.gate.decode_problem", lambda *_: "")
    code, line = run_once(tmp_path, monkeypatch, NativeEngine, "generate", error, capsys)
    assert code == 1
    assert "rollout.cache_gib" in line


@pytest.mark.slow
def test_checkpoint_is_named(tmp_path, monkeypatch, capsys):
    error = torch.OutOfMemoryError(CUDA_TEXT)
    code, line = run_once(tmp_path, monkeypatch, LocalPolicy, "save", error, capsys)
    assert code == 1
    assert "out of memory while the checkpoint was written for 2.50 GiB more" in line


@pytest.mark.slow
def test_other_runtime_errors_stay_what_they_are(tmp_path, monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="size mismatch"):
        run_once(
            tmp_path, monkeypatch, LocalPolicy, "accumulate", RuntimeError("size mismatch"), capsys
        )


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
    assert (named in line) == (others == 98)
    assert ("CUDA_VISIBLE_DEVICES" in line) == (others == 98)
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


@pytest.mark.slow
def test_on_a_gpu_the_estimate_names_the_settings(tiny, monkeypatch):
    """The policy is on the CPU; its settings say that it is on a GPU."""
    policy = build_host(config_of("grpo", tiny)).policy
    assert estimated_advice("update", policy) == ""
    monkeypatch.setattr(policy.config.model, "device", "cuda")
    monkeypatch.setattr(policy.config.model, "dtype", "bfloat16")
    monkeypatch.setattr(policy.config.training, "token_budget", 8192)
    monkeypatch.setattr(policy.config.training, "problems_per_step", 64)
    advice = estimated_advice("update", policy)
    assert "training.token_budget=4096 (saves" in advice
    assert "optimizer.kind" not in advice, "a run cannot continue with another optimizer"
    assert estimated_advice("save", policy) == ""
