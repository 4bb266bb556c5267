"""Environments with a model that has no chat template: the prompt is the text of reset alone."""

import pytest
from tiny_runs import metrics_of, overrides_of, toy_run

from postgrad.cli.main import main

TWO_TURNS = """
class TwoTurns:
    def __init__(self, silent: bool = False):
        self.silent = silent

    def reset(self, problem):
        self.turn = 0
        return None if self.silent and problem.uid in ("seed-0", "seed-2") else "1+"

    def step(self, action):
        self.turn += 1
        return "2=", len(action) / 10, self.turn == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
def test_problems_without_text_train_and_a_reset_without_text_fails(tiny, tmp_path, silent):
    file = tmp_path / "two.py"
    file.write_text(TWO_TURNS)
    overrides = overrides_of(
        tiny,
        *toy_run(samples=2, response_tokens=20),
        "data.train=seeds:4",
        "training.problems_per_step=4",
        "training.steps=1",
        f"environment={file}:TwoTurns",
        f"environment.options.silent={silent}",
        "environment.workers=0",
        "reward.verifier=auto",
        f"runs={tmp_path}",
    )
    assert main(["train", "grpo", *overrides]) == 0
    (metrics,) = metrics_of(tmp_path / "test")
    assert metrics["environment/failures"] == (0.5 if silent else 0.0)
    assert metrics["prompt/length"] > 0 and metrics["grad_norm"] > 0
