"""The rehearsal's times against those of a run of known costs."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import config_of

from postgrad.config.schema import Config
from postgrad.doctor.rehearsal import _rehearse
from postgrad.methods import find_method
from postgrad.training.result import StepResult
from postgrad.types import Batch, Trajectory

PROMPT = 90  # tokens
LONGEST_S = 90.0  # of a rehearsal


class FakeDriver:
    """Runs steps of known costs, whose responses all reach the limit. The first step is cold.

    A decode step takes `decode_s` whatever its rows, or `row_s` per row where that is more.
    """

    def __init__(self, config: Config, decode_s: float, row_s: float) -> None:
        self.config = config
        self.decode_s = decode_s
        self.row_s = row_s
        self.passed_s = 0.0  # by its clock
        objective = find_method("grpo")(config).objective
        ports = SimpleNamespace(policy=object(), engine=object())
        self.method = SimpleNamespace(ports=ports, objective=objective)
        self.rollouts = self

    def costs(self) -> dict[str, float]:
        problems = self.config.training.problems_per_step
        rows = problems * self.config.rollout.samples
        limit = self.config.rollout.max_response_tokens
        prompts = problems * PROMPT
        sample_s = prompts * self.row_s + (limit - 1) * max(self.decode_s, rows * self.row_s)
        update_s = (prompts + rows * limit) * 3 * self.row_s
        return {"stage/sample_s": sample_s, "stage/update_s": update_s}

    def next_step(self, number: int) -> tuple[Any, None]:
        sample_s = self.costs()["stage/sample_s"]
        self.passed_s += sample_s
        return SimpleNamespace(metrics={"stage/sample_s": sample_s}), None

    def step(self, number: int) -> StepResult:
        costs = {name: (3 if number == 1 else 1) * s for name, s in self.costs().items()}
        self.passed_s += sum(costs.values())
        limit = self.config.rollout.max_response_tokens
        rows = [
            Trajectory(str(problem), [0] * PROMPT, [0] * limit, group=problem, finish="length")
            for problem in range(self.config.training.problems_per_step)
            for _ in range(self.config.rollout.samples)
        ]
        return StepResult(number, Batch.of(rows), costs)


@pytest.mark.parametrize("row_s", [0.0002, 0.002, 0.015])
@pytest.mark.parametrize("decode_s", [0.0, 0.24])
@pytest.mark.parametrize(("problems", "samples", "limit"), [(2, 4, 64), (8, 8, 64), (16, 8, 256)])
def test_the_rehearsal_is_short_and_near_the_run(
    tiny, problems, samples, limit, decode_s, row_s
) -> None:
    sizes = (
        f"training.problems_per_step={problems}",
        f"rollout.samples={samples}",
        f"rollout.max_response_tokens={limit}",
    )
    config = config_of("grpo", tiny, *sizes)
    run = FakeDriver(config, decode_s, row_s)
    real = run.costs()
    small = config_of("grpo", tiny, *sizes, "training.problems_per_step=2")
    driver = FakeDriver(small, decode_s, row_s)
    rehearsal = _rehearse(driver, config, may_shorten=True)  # type: ignore[arg-type]
    assert driver.passed_s < LONGEST_S
    for stage in ("sample", "update"):
        seconds = real[f"stage/{stage}_s"]
        assert seconds / 1.5 < rehearsal.step[stage] < seconds * 1.5, stage
    assert rehearsal.counts_all_rows
