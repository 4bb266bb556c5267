"""kill -9 of runs of several methods: the rerun ends with the same bytes."""

import json

import pytest
from killed import assert_a_killed_run_ends_the_same
from tiny_runs import CURRICULUM, toy_run

RUNS = {
    "sft": ["optimizer.warmup_steps=0"],
    "dpo": ["optimizer.warmup_steps=0"],
    "cs336_dpo": ["data.prompt_style=own"],
    "ppo": ["training.ppo_epochs=2"],
    "grpo": [  # takes a minute: test_prefetch.py compares the bytes of the same file quickly
        "rollout.staleness=1",
        "cluster.backend=process",
        "cluster.engine_apart=true",
        "training.keep_checkpoints=9",
    ],
    "bupo": ["method.num_blocks=1", "method.phase_one_steps=3", "training.validate_every=0"],
    "curriculum": [
        CURRICULUM,
        "method.solved_score=0.5",
        "optimizer.kind=muon",
        "method.floor=0.3",
    ],
}
SAMPLED = ("grpo", "ppo", "bupo", "curriculum")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "grpo")) for name in RUNS],
)
def test_a_killed_run_ends_the_same(name, tiny, tmp_path):
    recipe = "grpo" if name == "curriculum" else name
    overrides = [
        *toy_run(steps=4, response_tokens=6),
        *RUNS[name],
        "training.updates_per_step=2",
        "training.checkpoint_every=2",
        "optimizer.lr=3e-3",
    ]
    if name in SAMPLED:
        verifier = tmp_path / "graded.py"
        verifier.write_text(
            "def graded(response, problem):\n    return sum(map(ord, response)) % 11 / 10\n"
        )
        overrides.append(f"reward.verifier={verifier}:graded")
    if recipe.endswith("dpo"):
        data = tmp_path / "pairs.jsonl"
        pairs = [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a in range(4)
            for b in range(4)
        ]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        overrides.append(f"data.train={data}")
    lines = assert_a_killed_run_ends_the_same(recipe, tiny, tmp_path, 3, overrides)
    assert all(line["grad_norm"] > 0 for line in lines if "grad_norm" in line)
    assert any("grad_norm" in line for line in lines)
