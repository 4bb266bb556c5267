"""benchmarks/research.py: all its commands compose, and its tables and figures are right."""

import importlib
import sys
from pathlib import Path

import pytest

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.training.warmup import warmup_config

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CLAIMS = (
    "grpo",
    "luffy",
    "exgrpo",
    "environments",
    "bupo",
    "classmate",
    "collapse",
    "losses",
    "mismatch",
)


@pytest.fixture(scope="module")
def research():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("research")
    sys.path.remove(str(BENCHMARKS))


def make_runs(research, claim, folder, *more):
    arguments = [claim, "--model=tiny", f"--out={folder}", "--depths=6,14,25", *more]
    options = research.parse_options(arguments)
    return research.make_runs(claim, research.CLAIMS[claim], options)


def composed(run):
    _, recipe, *overrides = run.arguments
    return compose(recipe, overrides, lambda name: find_method(name).Settings)


def test_every_claim_is_tested(research):
    assert set(research.CLAIMS) == set(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_commands_of_a_claim_pass_the_checks(research, tmp_path, claim):
    runs = make_runs(research, claim, tmp_path, "--seeds=7")
    assert len(runs) >= 2
    for run in runs:
        if run.script:
            continue
        config = composed(run)
        find_method(config.method.name)(config).check()
        if config.warmup.recipe:
            warmup = warmup_config(config)
            find_method(warmup.method.name)(warmup).check()
        assert config.seed == 7
        assert config.name == run.label
        assert config.training.steps == run.last_step


def test_arms_differ_only_in_what_is_compared(research, tmp_path):
    runs = make_runs(research, "losses", tmp_path, "--seeds=0")
    configs = [composed(run) for run in runs]
    for section in ("optimizer", "training", "rollout", "data", "reward", "model"):
        values = [getattr(config, section) for config in configs]
        assert all(value == values[0] for value in values), section


def test_only_chooses_arms_and_refuses_unknown_ones(research, tmp_path):
    runs = make_runs(research, "losses", tmp_path, "--only=GRPO,DAPO", "--seeds=0,1")
    assert [(run.arm, run.seed) for run in runs] == [
        ("GRPO", 0),
        ("DAPO", 0),
        ("GRPO", 1),
        ("DAPO", 1),
    ]
    with pytest.raises(SystemExit, match="PPO"):
        make_runs(research, "losses", tmp_path, "--only=PPO")
