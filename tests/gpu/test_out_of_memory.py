"""Out of memory on a GPU, in each stage: one line, exit code 1, and the same command continues."""

import os
import subprocess
import sys

import pytest
import torch
from llama import make_llama
from tiny_runs import metrics_of, metrics_without_timing, overrides_of, toy_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# In step 2 the process may use no more device memory than it holds, and then wants 1 GiB.
LIMITED_IN_STAGE = """
import sys
from contextlib import contextmanager
import torch
from postgrad.cli.main import main
from postgrad.training import checkpoint, stages
real = stages.explained_memory_errors
calls = []
@contextmanager
def limited(stage, policy=None):
    with real(stage, policy):
        calls.append(stage)
        if stage == "{stage}" and calls.count(stage) == {call}:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
        yield
stages.explained_memory_errors = checkpoint.explained_memory_errors = limited
sys.exit(main(sys.argv[1:]))
"""
# The process may use this much device memory from its start.
LIMITED_FROM_START = """
import sys
import torch
from postgrad.cli.main import main
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction({gib} * 2**30 / total)
sys.exit(main(sys.argv[1:]))
"""
VERIFIER = """
def graded(response, problem):
    return sum(map(ord, response)) % 11 / 10
"""


def run_limited(code, arguments):
    """Run the command with limited memory; return the only line that it wrote to stderr."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("postgrad: ")]
    assert len(lines) == 1, done.stderr
    assert "out of memory" in lines[0], lines[0]
    return lines[0]


def run_freely(arguments):
    command = [sys.executable, "-m", "postgrad.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ("sample", "step 2, stage sample"),
        ("update", "step 2, stage update"),
        ("save", "while the checkpoint was written"),
    ],
)
def test_a_stage_without_memory_is_one_line_and_the_run_continues(tiny, tmp_path, stage, named):
    (tmp_path / "graded.py").write_text(VERIFIER)
    overrides = [
        *toy_run(steps=3, response_tokens=12),
        "model.device=cuda",
        "training.checkpoint_every=1",
        "optimizer.lr=3e-3",
        f"reward.verifier={tmp_path / 'graded.py'}:graded",
    ]
    arguments = ["train", "grpo", *overrides_of(tiny, *overrides)]
    limited, whole = f"runs={tmp_path / 'limited'}", f"runs={tmp_path / 'whole'}"
    line = run_limited(LIMITED_IN_STAGE.format(stage=stage, call=2), [*arguments, limited])
    assert named in line, line
    assert metrics_of(tmp_path / "limited" / "test")[-1]["step"] == (2 if stage == "save" else 1)
    run_freely([*arguments, limited])
    run_freely([*arguments, whole])
    assert metrics_without_timing(tmp_path / "limited" / "test") == metrics_without_timing(
        tmp_path / "whole" / "test"
    )
    weights = "test/checkpoints/step-3/policy/model.safetensors"
    limited_weights = (tmp_path / "limited" / weights).read_bytes()
    assert limited_weights == (tmp_path / "whole" / weights).read_bytes()


def test_passes_that_are_too_large_name_the_stage_and_a_smaller_budget_continues(tmp_path):
    """The activations of one pass over 60,000 tokens do not fit into 3 GiB."""
    model = make_llama(tmp_path / "llama")
    (tmp_path / "graded.py").write_text(VERIFIER)
    overrides = [
        *toy_run(steps=1, problems=16, samples=16, response_tokens=256),
        "model.device=cuda",
        f"runs={tmp_path / 'runs'}",
        f"reward.verifier={tmp_path / 'graded.py'}:graded",
    ]
    arguments = ["train", "grpo", *overrides_of(model, *overrides)]
    code = LIMITED_FROM_START.format(gib=3)
    line = run_limited(code, [*arguments, "training.token_budget=100000"])
    assert "step 1, stage" in line and "training.token_budget" in line, line
    run_freely([*arguments, "training.token_budget=4096"])
