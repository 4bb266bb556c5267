"""500 steps with captured graphs on a GPU: device memory, host memory, threads and files stay."""

import gc
import os
from pathlib import Path

import pytest
import torch
from tiny_runs import config_of, toy_run

from postgrad.training.driver import open_driver
from postgrad.training.report import Reporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 500
MIB = 2**20
VERIFIER = """
def graded(response, problem):
    return sum(map(ord, response)) % 11 / 10
"""


def measure() -> dict[str, int]:
    """Return bytes on the device and the host, threads and open files of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "device_allocated": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "device_reserved": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        "host": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def soak(model: Path, folder: Path, steps: int, device: str) -> tuple[list[dict[str, int]], int]:
    """Train; return what was measured after every tenth of the steps, and the captured graphs."""
    (folder / "graded.py").write_text(VERIFIER)
    config = config_of(
        "grpo",
        model,
        *toy_run(steps=steps, response_tokens=12),
        f"model.device={device}",
        f"training.checkpoint_every={steps // 5}",
        "optimizer.lr=1e-5",
        f"reward.verifier={folder / 'graded.py'}:graded",
        f"runs={folder}",
    )
    measured = []
    with open_driver(config, Reporter()) as driver:
        for result in driver.steps():
            if result.number % (steps // 10) == 0:
                measured.append(measure())
        return measured, len(driver.method.ports.policy.graph_cache.captured)


def test_500_steps_do_not_grow(tiny, tmp_path):
    measured, num_graphs = soak(tiny, tmp_path, STEPS, "cuda")
    assert num_graphs > 0, "no pass was captured"
    assert len(measured) == 10
    early, late = measured[4], measured[-1]  # after 250 steps every size has been captured
    print("early", early, "late", late)
    assert late["device_allocated"] <= early["device_allocated"] + 4 * MIB
    assert late["device_reserved"] <= early["device_reserved"] + 32 * MIB
    assert late["host"] <= early["host"] + 32 * MIB
    assert late["threads"] <= early["threads"]
    assert late["files"] <= early["files"] + 1
