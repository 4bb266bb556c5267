"""A run on a GPU that is killed with SIGKILL and continued ends with the same bytes."""

import pytest
import torch
from killed import assert_a_killed_run_ends_the_same
from tiny_runs import toy_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VERIFIER = """
def graded(response, problem):
    return sum(map(ord, response)) % 11 / 10
"""
RUNS = {
    "grpo": ("grpo",),
    "luffy": ("luffy", "method.prefix_min=0.2", "method.num_demonstrations=2"),
    "bupo": ("bupo", "method.num_blocks=1", "method.phase_one_steps=3"),
    "lora": ("grpo", "model.lora.rank=4"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_the_same(tiny, tmp_path, name, dtype):
    if name == "lora":
        pytest.importorskip("peft")
    verifier = tmp_path / "graded.py"
    verifier.write_text(VERIFIER)
    recipe, *own = RUNS[name]
    overrides = [
        *toy_run(steps=5, response_tokens=12),
        *own,
        "model.device=cuda",
        f"model.dtype={dtype}",
        "training.updates_per_step=2",
        "training.checkpoint_every=2",
        "optimizer.lr=3e-3",
        f"reward.verifier={verifier}:graded",
    ]
    lines = assert_a_killed_run_ends_the_same(recipe, tiny, tmp_path, 3, overrides)
    assert all(line["grad_norm"] > 0 for line in lines)
