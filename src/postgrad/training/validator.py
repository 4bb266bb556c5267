"""Validates a run's policy, writes the results, and remembers the best step."""

from postgrad import phases
from postgrad.training import checkpoint
from postgrad.training.log import RunLog, read_metrics
from postgrad.training.memory import explained_memory_errors
from postgrad.training.open import OpenRun
from postgrad.training.reward_watch import RewardWatch
from postgrad.training.validation import BestStep, goal_met, num_answers, validate_sets
from postgrad.training.validation_answers import ValidationAnswers


class Validator:
    """Evaluates the sets of data.validation.

    Attributes:
        best: the best step by training.keep_best.
        watch: compares the training reward with the accuracy; the driver gives it each step.
    """

    def __init__(self, opened: OpenRun, log: RunLog) -> None:
        self.opened = opened
        self.log = log
        sets = opened.run.validation
        lines = read_metrics(opened.folder)
        # Somebody may have removed the best checkpoint; then the best of the others counts.
        saved = set(checkpoint.saved_steps(opened.folder))
        of_saved = [line for line in lines if line["step"] in saved]
        self.best = BestStep(opened.run.config, len(sets), of_saved)
        self.watch = RewardWatch(num_answers(opened.run.config, sets), lines)

    def validate(self, number: int) -> bool:
        """Evaluate the sets after step `number`; return whether training.stop_at is reached."""
        run = self.opened.run
        if not run.validation:
            return False
        kept = ValidationAnswers(run.config, self.opened.folder, run.scorer)
        phases.begin("validating")
        with explained_memory_errors("validate", run.method.ports.policy):
            metrics = validate_sets(run.method, run.validation, kept)
        kept.write(number)
        rises, warning = self.watch.add_validation(number, metrics)
        metrics |= rises
        self.log.write(number, metrics)
        self.best.update(number, metrics)
        self.opened.reporter.validated(number, metrics)
        if warning:
            self.opened.reporter.note(f"warning: {warning}")
        return goal_met(run.config, [metrics])

    def reached_at(self, start: int) -> bool:
        """Validate a new run; for a resumed one read whether training.stop_at was reached."""
        if start == 0:
            return self.validate(0)
        lines = [line for line in read_metrics(self.opened.folder) if line["step"] == start]
        return goal_met(self.opened.run.config, lines)
