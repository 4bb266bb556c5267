"""Runs with an environment: the policy learns a game of two turns; kill -9 in a turn; engines."""

import os
import signal
from pathlib import Path

import preloaded
import pyarrow.parquet as pq
import pytest
from tiny_runs import (
    EXAMPLES,
    config_of,
    metrics_of,
    metrics_without_timing,
    overrides_of,
    tree,
)

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import TOOL

TURN_GRPO = f"method.advantage={EXAMPLES / 'turn_advantages.py'}:turn_grpo"
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
        TURN_GRPO,
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


# Answers at different speeds. With KILL_AT, the answer of that number kills the driver instead.
DEADLY = """
import os, random, signal, time
from pathlib import Path

class Deadly:
    def reset(self, problem, seed):
        self.random = random.Random(seed)
        self.said = []

    def step(self, action):
        self.said.append(action)
        with Path(os.environ["COUNT_FILE"]).open("ab") as file:
            file.write(b"x")
            file.flush()
            count = file.tell()
        if count == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        time.sleep(0.02 * random.random())
        return str(self.random.randrange(10)), float(action in "0123456789"), len(self.said) == 3

    def get_state(self):
        return self.said
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_turn_ends_with_the_same_weights(
    overrides, tiny, tmp_path, monkeypatch
):
    """A step has 2 problems x 4 samples x 3 turns; the 30th answer is in step 2."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    words = [
        *overrides,
        f"environment={tmp_path / 'deadly.py'}:Deadly",
        "rollout.max_turns=3",
        "rollout.max_response_tokens=8",
        "rollout.samples=4",
        "training.problems_per_step=2",
        "training.steps=3",
        "training.checkpoint_every=1",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setenv("COUNT_FILE", str(tmp_path / "whole.count"))
    train(config_of("grpo", tiny, *words, f"runs={whole}"), Reporter())
    again = ["train", "grpo", *overrides_of(tiny, *words, f"runs={killed}")]
    environment = os.environ | {"COUNT_FILE": str(tmp_path / "killed.count"), "KILL_AT": "30"}
    done = preloaded.run(preloaded.COMMAND, *again, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert metrics_of(killed / "test")[-1]["step"] == 1, "killed within the rollouts of step 2"
    monkeypatch.setenv("COUNT_FILE", str(tmp_path / "again.count"))
    assert main(again) == 0
    assert tree(whole / "test" / "checkpoints") == tree(killed / "test" / "checkpoints")
    assert_equal_rollouts(whole / "test", killed / "test")


def assert_equal_rollouts(one: Path, other: Path) -> None:
    """Equal metrics and rollouts, except for the last bits of the engine's log-probs.

    Those depend on which rows decode together, and so on when environments answer.
    """
    for line, repeated in zip(*map(metrics_without_timing, (one, other)), strict=True):
        differing = {name for name in line if line[name] != repeated.get(name)}
        assert differing <= {"engine/gap_max", "engine/gap_mean", "kl/engine"}
    for file in sorted((one / "rollouts").iterdir()):
        tables = [pq.read_table(run / "rollouts" / file.name) for run in (one, other)]
        for name in tables[0].column_names:
            columns = [table[name].to_pylist() for table in tables]
            if name == "behavior_logprobs":
                for row, repeated in zip(*columns, strict=True):
                    assert row == pytest.approx(repeated, abs=1e-5)
            else:
                assert columns[0] == columns[1], name
