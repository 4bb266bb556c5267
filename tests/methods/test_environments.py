"""Runs with an environment: the policy learns a game of two turns."""

import pyarrow.parquet as pq
import pytest
from world import config_of, metrics_of

from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import TOOL

CHARACTERS = "0123456789+-*=()"
# The first turn must ask with "=". The answer is a digit, which the second turn must repeat.
GAME = """
class AskAndRepeat:
    def reset(self, problem):
        self.digit = "37"[int(problem.uid, 16) % 2]
        self.asked = None

    def step(self, action):
        if self.asked is None:
            self.asked = action == "="
            return (self.digit if self.asked else "0"), 0.3 * self.asked, False
        right = float(action == self.digit)
        return "", {"score": right, "right": right}, True
"""


@pytest.fixture
def overrides(tmp_path) -> list[str]:
    (tmp_path / "game.py").write_text(GAME)
    return [
        f"environment={tmp_path / 'game.py'}:AskAndRepeat",
        "environment.workers=1",
        "data.train=arithmetic:1:digits",
        f"rollout.stop=[{','.join(map(repr, CHARACTERS))}]",  # a turn is one character
        f"runs={tmp_path / 'runs'}",
        "rollout.max_response_tokens=4",
        "rollout.max_turns=2",
        "method.advantage=turn_grpo",
    ]


@pytest.mark.slow
def test_a_policy_learns_a_game_of_two_turns(overrides, tiny):
    """Without reading the answer of the first turn, 0.3 + 0.5 is the best possible."""
    config = config_of(
        "grpo",
        tiny,
        *overrides,
        "training.steps=14",
        "training.problems_per_step=8",
        "rollout.samples=24",
        "optimizer.lr=1e-2",
    )
    folder = train(config, Reporter()).folder
    lines = metrics_of(folder)
    assert lines[0]["reward/mean"] < 0.3
    best = max(lines, key=lambda line: line["reward/mean"])
    assert best["reward/mean"] > 1.0 and best["reward/right"] > 0.75
    assert best["tools/turns"] > 1.9 and best["environment/failures"] == 0
    gaps = [line["engine/gap_max"] for line in lines if "engine/gap_max" in line]
    assert max(gaps) < 1e-4
    rows = pq.read_table(folder / "rollouts" / "step-000001.parquet").to_pylist()
    for row in rows:
        for source, trained in zip(row["token_source"], row["loss_mask"], strict=True):
            assert trained == (source != TOOL), "no loss sees an observation"


@pytest.mark.parametrize(
    ("recipe", "word", "key"),
    [
        ("luffy", "environment=guess", "environment=guess"),
        ("grpo", "environment.options.high=3", r"environment\.options"),
        ("grpo", "environment.timeout_s=3", r"environment\.timeout_s"),
        ("grpo", "method.advantage=turn_grpo", r"method\.advantage=turn_grpo"),
        ("grpo", "method.turn_weight=3", r"method\.turn_weight"),
    ],
)
def test_settings_without_an_effect_are_refused(recipe, word, key, tiny):
    with pytest.raises(ConfigError, match=key):
        find_method(recipe)(config_of(recipe, tiny, word)).check()
