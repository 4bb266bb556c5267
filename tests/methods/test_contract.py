"""What holds for every method, with one declaration each.

A run whose models live in a child process until it is killed, and which is continued in this
process, ends with the bytes of an unbroken run in this process. So checkpoints hold all state, and
no stage or loss depends on where the models are. With adapters, only they change. And methods that
are rewarded for sevens learn to write them, from fixed seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonl import write_jsonl
from killed import assert_a_killed_run_ends_the_same
from method_runs import run
from safetensors.torch import load_file
from tiny_runs import CURRICULUM, toy_run

from postgrad.cluster.wire import decode
from postgrad.model.load.tiny import make_tiny

pytestmark = pytest.mark.slow

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A toy run. `shows` lists metrics of the second step that are not 0."""

    overrides: tuple[str, ...] = ()
    recipe: str = ""  # empty: the name of the case
    verifier: str = ""
    pairs: bool = False
    shows: tuple[str, ...] = ()
    steps: int = 4
    kill_at: int = 3
    killed_in: tuple[str, ...] = ("cluster.backend=process",)
    check: Callable[[Lines, Path], None] = lambda lines, checkpoint: None


def was_mixed(lines: Lines, checkpoint: Path) -> None:
    assert lines[5]["replay/pool"] > 0
    assert lines[-1]["replay/mixed"] == 1.0 and lines[-1]["replay/groups"] > 0


def asked_once_per_problem(lines: Lines, checkpoint: Path) -> None:
    """The score without a thought is part of the state, also of the steps before the kill."""
    kept = decode((checkpoint / "method.bin").read_bytes())["without"]
    assert len(kept) > 4 and all(line["classmate/asked"] > 0 for line in lines)


CASES = {
    "sft": Case(("optimizer.warmup_steps=0",), shows=("sft/loss",)),
    "dpo": Case(("data.prompt_style=own",), recipe="cs336_dpo", pairs=True, shows=("dpo/margin",)),
    "kto": Case(("optimizer.warmup_steps=0",), pairs=True, shows=("kto/kl",)),
    "reward_model": Case(("optimizer.warmup_steps=0",), pairs=True),
    "online_dpo": Case(verifier="graded", shows=("dpo/groups_with_pair",)),
    "ppo": Case(
        ("training.ppo_epochs=2", "method.kl=loss", "method.kl_coef=0.1"),
        verifier="graded",
        shows=("critic/loss", "kl/reference"),
    ),
    "grpo": Case(  # takes a minute: test_prefetch.py compares the bytes of the same file quickly
        (
            "rollout.staleness=1",
            "cluster.backend=process",
            "cluster.engines=1",
            "training.keep_checkpoints=9",
        ),
        verifier="graded",
        killed_in=(),
    ),
    "gkd": Case(("optimizer.warmup_steps=0",), shows=("distill/jsd",)),
    "bupo": Case(
        ("method.num_blocks=1", "method.phase_one_steps=3", "method.kl=loss"),
        verifier="graded",
        shows=("internal/divergence", "kl/reference"),
    ),
    "luffy": Case(
        (
            "method.prefix_min=0.2",
            "method.num_demonstrations=2",
            "method.max_probability=0.9",
        ),
        verifier="graded",
        shows=("off_policy/token_share", "off_policy/tokens", "on_policy/tokens"),
        steps=5,
    ),
    "exgrpo": Case(
        (
            "method.start_at=0.2",
            "method.retire_margin=4",
            "training.problems_per_step=6",
        ),
        verifier="has_seven",
        steps=9,
        kill_at=7,
        check=was_mixed,
    ),
    "classmate": Case(
        (
            "method.classmate_max_tokens=4",
            "method.condition=always",
            "method.reward_type=remove_wo_cot",
        ),
        verifier="graded",
        check=asked_once_per_problem,
    ),
    "adapters": Case(  # merged weights have lost the last bits of their state
        ("model.lora.rank=4", "method.kl=loss"),
        recipe="grpo",
        verifier="graded",
        shows=("kl/reference",),
    ),
    "curriculum": Case(
        (CURRICULUM, "method.solved_score=0.5", "method.floor=0.3"),
        recipe="grpo",
        verifier="graded",
    ),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(4)
        for b in range(4)
    ]
    write_jsonl(file, *rows)
    return file


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "grpo")) for name in CASES]
)
def test_a_killed_run_ends_the_same_wherever_its_models_are(name, tiny, verifiers, pairs, tmp_path):
    case = CASES[name]
    overrides = [
        *toy_run(steps=case.steps, response_tokens=6),
        "training.updates_per_step=2",
        "training.checkpoint_every=2",
        "optimizer.lr=3e-3",
        *case.overrides,
    ]
    if case.verifier:
        overrides.append(f"reward.verifier={verifiers}:{case.verifier}")
    if case.pairs:
        overrides.append(f"data.train={pairs}")
    if name == "gkd":
        overrides.append(f"method.teacher={tiny_teacher(tmp_path)}")
    lines = assert_a_killed_run_ends_the_same(
        case.recipe or name, tiny, tmp_path, case.kill_at, overrides, case.killed_in
    )
    norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    assert norms and all(norm > 0 for norm in norms)
    assert all(lines[1][metric] != 0 for metric in case.shows), lines[1]
    case.check(lines, tmp_path / "killed" / "test" / "checkpoints" / f"step-{case.steps}")


def tiny_teacher(folder: Path) -> Path:
    return make_tiny(folder / "teacher", seed=3, layers=1, width=32)


ADAPTED = ("ppo", "luffy", "exgrpo", "bupo", "classmate", "reinforce_pp", "dapo")


@pytest.mark.parametrize("recipe", ADAPTED)
def test_only_adapters_change(recipe, tiny, verifiers, tmp_path):
    """LoRA works with critics, references, views, replays and classmates."""
    pytest.importorskip("peft")
    overrides = ("optimizer.lr=1e-2", f"reward.verifier={verifiers}:graded", "model.lora.rank=4")
    lines = run(recipe, tiny, tmp_path, *overrides)
    assert all(line["engine/gap_max"] < 1e-4 and line["grad_norm"] > 0 for line in lines)
    before = load_file(tiny / "model.safetensors")
    after = load_file(tmp_path / "test" / "checkpoints" / "step-2" / "policy" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert moved and all("_proj." in name for name in moved), moved


# ---- learning: a random model writes sevens after tens of steps

# The reward is the share of sevens among six tokens: about 0.06 at the start (one of eighteen
# tokens) and 1 at best. A control run gets rewards of the same size that cannot be learned, with
# the same settings, and must stay below the bound.
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
    "bupo": (
        "method.num_blocks=1",
        "method.phase_one_steps=6",
        "training.updates_per_step=1",
    ),
    "online_dpo": (
        "optimizer.lr=1e-2",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "training.problems_per_step=24",
        "training.steps=20",
    ),
}


# The golden runs have the numbers of the others; that they learn follows from those of grpo.
FREQUENT = ("grpo", "ppo", "bupo", "online_dpo")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in FREQUENT)) for name in LEARNERS],
)
def test_it_learns_to_write_sevens(recipe, fresh, verifiers, tmp_path):
    overrides = (*SETTINGS, *LEARNERS[recipe], f"reward.verifier={verifiers}:sevens")
    lines = run(recipe, fresh, tmp_path, *overrides)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[:2]) / 2 < 0.15, rewards
    assert all(line.get("engine/gap_max", 0.0) < 1e-4 for line in lines)
    assert sum(rewards[-3:]) / 3 > (0.4 if recipe == "online_dpo" else BOUND), rewards
    if recipe == "bupo":
        assert [line["phase"] for line in lines] == [1] * 6 + [2] * 24
        assert lines[5]["internal/entropy"] < lines[0]["internal/entropy"]
        return
    if recipe != "online_dpo":
        assert lines[-1]["entropy"] < lines[0]["entropy"]
    if recipe == "ppo":
        assert max(line["critic/explained_variance"] for line in lines[5:]) > 0.05


@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_control_rewards_without_meaning_teach_no_sevens(recipe, fresh, verifiers, tmp_path):
    lines = run(
        recipe, fresh, tmp_path, *SETTINGS, *LEARNERS[recipe], f"reward.verifier={verifiers}:noise"
    )
    sevens = [line["reward/sevens"] for line in lines]
    assert sum(sevens[-3:]) / 3 < BOUND / 2, sevens
