"""GRPO with a curriculum: problems are drawn by how often the policy solves them.

The run goes through the data in epochs as always. When a problem's turn comes, it is drawn with
probability max(floor, 4 · s · (1 - s)), where s is a running mean of its solve rate; a problem that
was never drawn is always taken. `method.floor=0` drops problems that are always right or always
wrong; a small floor draws them now and then, so that their estimate can recover.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.algorithms.curriculum import draw_probability, updated_rate
from postgrad.config.schema import Config, setting
from postgrad.errors import ConfigError, RunError
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.step import Step
from postgrad.types import Batch, Problem


@dataclass
class CurriculumSettings(GrpoSettings):
    floor: float = setting(
        0.1,
        "probability of drawing a problem that is always right or always wrong; 0 drops it",
        at_least=0.0,
        at_most=1.0,
    )
    memory: float = setting(
        0.5,
        "weight of the earlier solve rate of a problem when it was drawn again",
        at_least=0.0,
        at_most=0.99,
    )
    solved_score: float = setting(1.0, "a response with at least this reward is right")


class Curriculum(Grpo):
    Settings = CurriculumSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.solve_rates: dict[str, float] = {}  # by uid, of problems that were drawn

    def check(self) -> None:
        super().check()
        if self.config.rollout.staleness:
            raise ConfigError(
                f"rollout.staleness={self.config.rollout.staleness}: a curriculum draws problems "
                "by the results of the step before; use rollout.staleness=0"
            )
        if self.settings.max_refills:
            raise ConfigError(
                f"method.max_refills={self.settings.max_refills}: refills would draw problems "
                "without the curriculum; use method.max_refills=0"
            )

    # ---- stages, on the driver

    def draw(self, _: Any, step: Step) -> list[Problem]:
        """The next problems that their solve rates let through."""
        count = self.config.training.problems_per_step
        drawn: list[Problem] = []
        num_skipped = 0
        while len(drawn) < count:
            (problem,) = step.data.draw(1)
            if self.is_drawn(problem, step, len(drawn) + num_skipped):
                drawn.append(problem)
                continue
            num_skipped += 1
            if num_skipped > 100 * len(step.data.problems):
                raise RunError(
                    f"all {len(step.data.problems)} problems are always right or always wrong; "
                    "end the run here, add problems, or raise method.floor"
                )
        step.metrics["curriculum/skipped"] = float(num_skipped)
        return drawn

    def is_drawn(self, problem: Problem, step: Step, position: int) -> bool:
        """Whether the problem is taken at its turn; random numbers follow from seed and step."""
        rate = self.solve_rates.get(problem.uid)
        if rate is None:
            return True
        probability = draw_probability(rate, self.settings.floor)
        return self.rng(step, f"curriculum/{problem.uid}", position).random() < probability

    def score(self, batch: Batch, step: Step) -> Batch:
        """Adds the solve rates of this step's problems to the estimates."""
        batch = super().score(batch, step)
        right = batch.rows["reward"] >= self.settings.solved_score
        uids: Sequence[str] = batch.rows["uid"]
        by_uid: dict[str, list[float]] = {}
        for uid, is_right in zip(uids, right.tolist(), strict=True):
            by_uid.setdefault(uid, []).append(float(is_right))
        for uid, results in by_uid.items():
            rate = sum(results) / len(results)
            old = self.solve_rates.get(uid)
            self.solve_rates[uid] = updated_rate(old, rate, self.settings.memory)
        rates = list(self.solve_rates.values())
        step.metrics["curriculum/solve_rate"] = sum(rates) / len(rates)
        flat = sum(rate in (0.0, 1.0) for rate in rates)
        step.metrics["curriculum/always_or_never"] = flat / len(rates)
        return batch

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"solve_rates": dict(self.solve_rates)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.solve_rates = dict(state["solve_rates"])
