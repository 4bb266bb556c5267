"""Validation: the named sets of data.validation, their answers, and which step was the best."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad import phases
from postgrad.config.schema import Config, TrainingConfig
from postgrad.data.rollout_folder import write_pictures
from postgrad.errors import RunError
from postgrad.files import atomic_write_text
from postgrad.methods.method import Method
from postgrad.pictures import Picture, text_of_content
from postgrad.problem import Problem
from postgrad.rollout.respond import Answer
from postgrad.training import checkpoint
from postgrad.training.guard import RewardWatch
from postgrad.training.log import RunLog, read_metrics
from postgrad.training.memory import explained_memory_errors
from postgrad.training.open import OpenRun
from postgrad.training.prepare import MEAN
from postgrad.user_code import user_error

if TYPE_CHECKING:
    from postgrad.verifiers.scorer import Scorer

PREFIX = "validation/"
PASS_SCORE = 1.0  # smallest score of a right answer


def validation_due(training: TrainingConfig, number: int) -> bool:
    """Whether the model is validated after step `number`: every validate_every-th and the last."""
    every = training.validate_every
    return number == training.steps or (every > 0 and number % every == 0)


class Validator:
    """Evaluates the sets of data.validation, writes the results, remembers the best step.

    Attributes:
        best: the best step by training.keep_best.
        watch: compares the training reward with the accuracy; the driver gives it each step.
    """

    def __init__(self, opened: OpenRun, log: RunLog) -> None:
        self.run = opened.run
        self.folder = opened.folder
        self.reporter = opened.reporter
        self.log = log
        sets = opened.run.validation
        lines = read_metrics(opened.folder)
        # Somebody may have removed the best checkpoint; then the best of the others counts.
        saved = set(checkpoint.saved_steps(opened.folder))
        of_saved = [line for line in lines if line["step"] in saved]
        training = opened.run.config.training
        self.best = BestStep(training.keep_best, len(sets), of_saved)
        # The standard error of the accuracy follows from the number of answers.
        num_answers = training.validation_samples * sum(map(len, sets.values()))
        self.watch = RewardWatch(max(1, num_answers), lines)

    def validate(self, number: int) -> bool:
        """Evaluate the sets after step `number`; return whether training.stop_at is reached."""
        run = self.run
        if not run.validation:
            return False
        answers = ValidationAnswers(run.config, self.folder, run.scorer)
        phases.begin("validating")
        try:
            with explained_memory_errors("validate", run.method.ports.policy):
                metrics = validate_sets(run.method, run.validation, answers)
        except Exception as error:
            if text := user_error(error):
                raise RunError(f"validation after step {number}: {text}") from error
            raise
        answers.write(number)
        rises, warning = self.watch.add_validation(number, metrics)
        metrics |= rises
        self.log.write(number, metrics)
        self.best.update(number, metrics)
        self.reporter.validated(number, metrics)
        if warning:
            self.reporter.note(f"warning: {warning}")
        return goal_met(run.config, [metrics])

    def reached_at(self, start: int) -> bool:
        """Validate a new run; for a resumed one read whether training.stop_at was reached."""
        if start == 0:
            return self.validate(0)
        lines = [line for line in read_metrics(self.folder) if line["step"] == start]
        return goal_met(self.run.config, lines)


def goal_met(config: Config, lines: Iterable[Mapping[str, float]]) -> bool:
    """Whether one of these lines of metrics has an accuracy of at least training.stop_at."""
    goal = config.training.stop_at
    return goal is not None and any(line.get(f"{PREFIX}accuracy", -1.0) >= goal for line in lines)


def validate_sets(
    method: Method,
    sets: Mapping[str, Sequence[Problem]],
    kept: "ValidationAnswers | None" = None,
) -> dict[str, float]:
    """Return the method's validation metrics; `kept` gets the answers.

    With several sets: validation/SET/... per set, and validation/... as the mean over the sets.
    """
    results: dict[str, dict[str, float]] = {}
    for name, problems in sets.items():
        results[name] = method.validate(problems)
        if kept is not None:
            results[name] |= kept.add(name, method.answers)
    first = next(iter(results.values()))
    if len(results) == 1:
        return first
    metrics: dict[str, float] = {}
    for key in first:
        values = [result[key] for result in results.values() if key in result]
        metrics[key] = sum(values) / len(values)
    for name, result in results.items():
        for key, value in result.items():
            metrics[f"{PREFIX}{name}/{key.removeprefix(PREFIX)}"] = value
    return metrics


class BestStep:
    """The step with the best validation by `training.keep_best`; `step` is None if there is none.

    Best is the highest accuracy, or the lowest loss where there is no accuracy; the first wins.
    A resumed run finds it in the lines of metrics.jsonl.
    """

    def __init__(self, keep_best: str, num_sets: int, lines: Iterable[Mapping[str, float]]) -> None:
        self.name = keep_best
        self.prefix = PREFIX if keep_best == MEAN or num_sets == 1 else f"{PREFIX}{keep_best}/"
        self.step: int | None = None
        self.value = float("-inf")
        for line in lines:
            if any(key.startswith(PREFIX) for key in line):
                self.update(int(line["step"]), line)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare a validation with the best so far.

        Step 0 is ignored: the model that a run starts from is not one of its checkpoints.
        """
        if not self.name or step == 0:
            return
        accuracy = metrics.get(f"{self.prefix}accuracy")
        loss = metrics.get(f"{self.prefix}loss")
        if accuracy is None and loss is None:
            raise RunError(
                f"training.keep_best={self.name}: the validation has neither accuracy nor loss"
            )
        value = accuracy if loss is None or accuracy is not None else -loss
        if value is not None and value > self.value:
            self.step = step
            self.value = value


class ValidationAnswers:
    """Collects the answers of one validation and writes them to RUN/eval/validation-STEP/.

    The folder has the files of an evaluation, so the page shows them as one: SET.jsonl (with a
    second pass also SET-sampled.jsonl) and summary.json.
    """

    def __init__(self, config: Config, folder: Path, scorer: "Scorer") -> None:
        self.config = config
        self.folder = folder
        self.scorer = scorer
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.pictures: dict[Picture, None] = {}

    def add(self, set_name: str, answers: Mapping[str, Sequence[Answer]]) -> dict[str, float]:
        """Keep the answers of a set, by pass; return metrics of the last pass.

        They are validation/length, truncated and part/NAME; with k > 1 samples per problem also
        best@k and maj@k.
        """
        rows: list[dict[str, Any]] = []
        for number, some in enumerate(answers.values()):
            rows = [self._row(answer) for answer in some]
            shown = [picture for answer in some for picture in answer.problem.prompt_images]
            self.pictures |= dict.fromkeys(shown)
            self.rows[set_name if number == 0 else f"{set_name}-sampled"] = rows
        return answer_metrics(rows) if rows else {}

    def write(self, step: int) -> None:
        """Write the files of this validation. Raises RunError."""
        if not self.rows:
            return
        from postgrad.results.metrics import INTERVAL, summarize

        folder = self.folder / "eval" / f"validation-{step:06d}"
        summary = {
            "model": f"{self.config.name}-step-{step}",
            "settings": {
                "step": step,
                "seed": self.config.seed,
                "reward": {"verifier": self.config.reward.verifier, "pass_score": PASS_SCORE},
            },
            "interval": INTERVAL,
            "sets": {name: summarize(rows) for name, rows in self.rows.items()},
            "speed": {},
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_pictures(self.folder, self.pictures)
            for name, rows in self.rows.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                atomic_write_text(folder / f"{name}.jsonl", lines)
            atomic_write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{folder} could not be written: {error.strerror}") from error

    def _row(self, answer: Answer) -> dict[str, Any]:
        from postgrad.results.rows import result_row

        problem = answer.problem
        return result_row(
            problem,
            answer.sample,
            answer.text,
            answer.verdict,
            verifier=self.scorer.name_for(problem),
            pass_score=PASS_SCORE,
            prompt=text_of_content(problem.messages[-1]["content"]),
            finish=answer.finish,
            length=len(answer.tokens),
            seed=answer.seed,
        )


def answer_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of the rows of one pass, as validation/NAME."""
    from postgrad.results.metrics import group_by_problem, summarize

    summary = summarize(rows)
    metrics = {"length": summary["length"]["mean"], "truncated": summary["truncated"]}
    metrics |= {f"part/{name}": value for name, value in summary["parts"].items()}
    samples = summary["samples"]
    if samples > 1:
        best = [max(row["score"] or 0.0 for row in group) for group in group_by_problem(rows)]
        metrics[f"best@{samples}"] = sum(best) / len(best)
        if summary["maj"]:
            metrics[f"maj@{samples}"] = summary["maj"][str(samples)]["value"]
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}
