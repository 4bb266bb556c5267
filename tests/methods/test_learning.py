"""The algorithms learn, from fixed seeds: a random model learns to write sevens in tens of steps.

The reward is the share of sevens among six tokens: about 0.06 at the start (one of eighteen tokens)
and 1 at best. A control run gets rewards of the same size that cannot be learned, with the same
settings, and must stay below the bound. DPO learns from pairs.
"""

import json

import pytest
from method_runs import run

from postgrad.model.load.tiny import make_tiny

pytestmark = pytest.mark.slow

BOUND = 0.5  # mean reward of the last three steps
SETTINGS = (
    "optimizer.lr=5e-3",
    "training.steps=30",
    "training.problems_per_step=8",
    "rollout.samples=8",
    "training.checkpoint_every=1000",
)
LEARNERS = {
    "grpo": (),
    "rloo": (),
    "remax": (),
    "reinforce_pp": (),
    "ppo": ("method.critic_lr=5e-3",),
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A model as it comes from its initialization: nearly uniform."""
    return make_tiny(tmp_path_factory.mktemp("models") / "fresh", seed=0, layers=2, width=32)


@pytest.mark.parametrize("recipe", LEARNERS)
def test_it_learns_to_write_sevens(recipe, fresh, verifiers, tmp_path):
    lines = run(
        recipe, fresh, tmp_path, *SETTINGS, *LEARNERS[recipe], f"reward.verifier={verifiers}:sevens"
    )
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[:2]) / 2 < 0.15, rewards
    assert sum(rewards[-3:]) / 3 > BOUND, rewards
    assert lines[-1]["entropy"] < lines[0]["entropy"]
    if recipe == "ppo":
        assert max(line["critic/explained_variance"] for line in lines[5:]) > 0.05


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_control_rewards_without_meaning_teach_no_sevens(recipe, fresh, verifiers, tmp_path):
    lines = run(
        recipe, fresh, tmp_path, *SETTINGS, *LEARNERS[recipe], f"reward.verifier={verifiers}:noise"
    )
    sevens = [line["reward/sevens"] for line in lines]
    assert sum(sevens[-3:]) / 3 < BOUND / 2, sevens


def test_dpo_raises_margin_and_accuracy(fresh, tmp_path):
    """The chosen answer repeats the first digit, the rejected one the second.

    Unseen pairs follow it.
    """
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a) * 3, "rejected": str(b) * 3, "uid": f"{a}{b}"}
        for a in range(10)
        for b in range(10)
        if a != b
    ]
    files = {"train": [p for i, p in enumerate(pairs) if i % 5], "validation": pairs[::5]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.{name}={tmp_path / name}.jsonl" for name in files]
    own = (
        "optimizer.lr=3e-3",
        "optimizer.warmup_steps=0",
        "training.steps=60",
        "training.problems_per_step=24",
    )
    lines = run("dpo", fresh, tmp_path, *overrides, *own, "training.checkpoint_every=1000")
    steps = [line for line in lines if "dpo/margin" in line]
    first, last = [line for line in lines if "validation/margin" in line]
    assert abs(steps[0]["dpo/margin"]) < 1e-6 and first["validation/margin"] == 0.0, (
        "the policy starts as its reference"
    )
    assert sum(line["dpo/margin"] for line in steps[-3:]) / 3 > 1.0
    assert sum(line["dpo/accuracy"] for line in steps[-3:]) / 3 > 0.95
    assert last["validation/accuracy"] > 0.8 and last["validation/margin"] > 0.5
