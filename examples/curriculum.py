"""GRPO with a curriculum, a method in one file: problems are drawn by how often they are solved.

    postgrad train grpo method=examples/curriculum.py:Curriculum model.path=MODEL data.train=FILE

It works with every recipe whose method is grpo. The run goes through the data in epochs as always.
When a problem's turn comes, it is drawn with probability max(floor, 4 · s · (1 - s)), where s is a
running mean of its solve rate; a problem that was never drawn is always taken. `method.floor=0`
drops problems that are always right or always wrong; a small floor draws them now and then, so that
their estimate can recover. Expect: curriculum/always_or_never rises, and
advantages/rows_with_signal stays higher than without.
"""

from dataclasses import dataclass

from postgrad import ConfigError, RunError
from postgrad.config.schema import setting
from postgrad.methods.grpo import Grpo, GrpoSettings


def draw_probability(solve_rate, floor):
    """Return the probability that a problem is drawn when its turn comes.

    A problem of which s of the responses are right gives a group with a difference to learn from
    only if s is neither 0 nor 1; s · (1 - s) is the variance of its reward. The probability is 1
    for a problem that is solved half of the time.
    """
    return max(floor, 4.0 * solve_rate * (1.0 - solve_rate))


@dataclass
class CurriculumSettings(GrpoSettings):
    floor: float = setting(
        0.1,
        "probability of drawing a problem that is always right or always wrong; 0 drops it",
        at_least=0.0,
        at_most=1.0,
    )
    solve_rate_decay: float = setting(
        0.5,
        "weight of the earlier solve rate of a problem when it was drawn again",
        at_least=0.0,
        at_most=0.99,
    )
    solved_score: float = setting(1.0, "a response with at least this reward is right")


class Curriculum(Grpo):
    Settings = CurriculumSettings

    def __init__(self, config):
        super().__init__(config)
        self.solve_rates = {}  # by uid, of problems that were drawn

    def check(self):
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

    def draw(self, _, step):
        """Return the next problems that their solve rates let through."""
        count = self.config.training.problems_per_step
        drawn = []
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

    def is_drawn(self, problem, step, position):
        """Return whether the problem is taken; random numbers follow from seed and step."""
        rate = self.solve_rates.get(problem.uid)
        if rate is None:
            return True
        probability = draw_probability(rate, self.settings.floor)
        return self.rng(step, f"curriculum/{problem.uid}", position).random() < probability

    def score(self, batch, step):
        """Add the solve rates of this step's problems to the estimates."""
        batch = super().score(batch, step)
        right = batch.rows["reward"] >= self.settings.solved_score
        by_uid = {}
        for uid, is_right in zip(batch.rows["uid"], right.tolist(), strict=True):
            by_uid.setdefault(uid, []).append(float(is_right))
        for uid, results in by_uid.items():
            rate = sum(results) / len(results)
            if uid in self.solve_rates:
                decay = self.settings.solve_rate_decay
                rate = decay * self.solve_rates[uid] + (1.0 - decay) * rate
            self.solve_rates[uid] = rate
        rates = list(self.solve_rates.values())
        step.metrics["curriculum/solve_rate"] = sum(rates) / len(rates)
        flat = sum(rate in (0.0, 1.0) for rate in rates)
        step.metrics["curriculum/always_or_never"] = flat / len(rates)
        return batch

    # ---- state

    def state(self):
        return super().state() | {"solve_rates": dict(self.solve_rates)}

    def load(self, state):
        super().load(state)
        self.solve_rates = dict(state["solve_rates"])
