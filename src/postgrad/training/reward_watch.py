"""Warns if the training reward rises and the validation accuracy does not.

That is how a reward looks that the policy has learned to cheat, or training problems that it has
learned by heart. Everything is computed from metrics.jsonl, so a resumed run warns as one that was
never stopped.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance

INTERVALS = 3  # between validations, that a comparison looks back
MIN_STEPS = 4  # training steps per interval; with fewer there is no estimate of the noise
MIN_T = 4.0  # Welch's t of the rise of the training reward
MIN_ERRORS = 2.0  # smallest rise of the reward, in standard errors of the change of accuracy

REWARD = "reward/mean"
ACCURACY = "validation/accuracy"
ANSWER = "validation/part/"  # and a name that ends in "answer": accuracy if the reward has terms


class RewardWatch:
    """Compares the rise of the training reward with that of the validation accuracy.

    Args:
        num_answers: responses per validation, for the standard error of its accuracy.
        lines: metrics.jsonl so far.
    """

    def __init__(self, num_answers: int, lines: Iterable[Mapping[str, float]]) -> None:
        self.num_answers = num_answers
        self.rewards: list[tuple[int, float]] = []  # (step, mean training reward)
        self.accuracies: list[tuple[int, float]] = []  # (step, validation accuracy)
        self.warned = False
        for line in lines:
            self.add_step(line)
            self.add_validation(int(line["step"]), line)

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Keep the training reward of a step."""
        if REWARD in metrics:
            self.rewards.append((int(metrics["step"]), metrics[REWARD]))

    def add_validation(
        self, step: int, metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], str]:
        """Return the rises over the last INTERVALS validations as metrics, and a warning or "".

        A warning is given once, until the accuracy rises again. There are no metrics before
        INTERVALS + 1 validations, or with fewer than MIN_STEPS steps between two of them.
        """
        accuracy = answer_accuracy(metrics)
        if accuracy is None:
            return {}, ""
        self.accuracies.append((step, accuracy))
        if len(self.accuracies) <= INTERVALS:
            return {}, ""
        starts = [start for start, _ in self.accuracies[-INTERVALS - 1 :]]
        first = self._rewards_between(starts[0], starts[1])
        last = self._rewards_between(starts[-2], starts[-1])
        if min(len(first), len(last)) < MIN_STEPS:
            return {}, ""
        before, after = self.accuracies[-INTERVALS - 1][1], accuracy
        rise = fmean(last) - fmean(first)
        suspicious = is_suspicious(first, last, before, after, self.num_answers)
        text = ""
        if suspicious and not self.warned:
            text = (
                f"since step {starts[0]} the training reward rose by {rise:.3g} and the validation "
                f"accuracy did not ({before:.3f}, now {after:.3f}); the policy may cheat the "
                "reward or repeat training problems: read the rollouts of this step"
            )
        self.warned = suspicious
        metrics = {"watch/reward_rise": rise, "watch/accuracy_rise": after - before}
        return metrics | {"watch/suspicious": float(suspicious)}, text

    def _rewards_between(self, start: int, end: int) -> list[float]:
        return [reward for step, reward in self.rewards if start < step <= end]


def answer_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the share of right answers of a validation; without that part, its mean score."""
    parts = [name for name in metrics if name.startswith(ANSWER) and name.endswith("answer")]
    return metrics[parts[0]] if len(parts) == 1 else metrics.get(ACCURACY)


def is_suspicious(
    first: Sequence[float], last: Sequence[float], before: float, after: float, num_answers: int
) -> bool:
    """Return whether rewards rose from `first` to `last` while the accuracy did not rise at all.

    The rise must be larger than the noise of the steps, and so large that the same rise of the
    accuracy could hardly be missed with this many answers.
    """
    if after > before:
        return False
    rise = fmean(last) - fmean(first)
    step_error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    variances = sum(max(0.0, share * (1 - share)) for share in (before, after))
    accuracy_error = math.sqrt(variances / num_answers)
    return rise > 0 and rise >= MIN_T * step_error and rise >= MIN_ERRORS * accuracy_error
