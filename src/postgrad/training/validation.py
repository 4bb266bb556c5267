"""Validation: the named sets of data.validation, and which step was the best by one of them."""

from collections.abc import Iterable, Mapping, Sequence

from postgrad.config.schema import Config, TrainingConfig
from postgrad.data.problems import Report, load_problems
from postgrad.data.sets import find_test_set_evidence, split_sets
from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.methods.method import Method
from postgrad.problem import Problem
from postgrad.training.validation_answers import ValidationAnswers

MEAN = "mean"  # training.keep_best=mean: the mean of all sets
PREFIX = "validation/"


def load_sets(config: Config, report: Report | None = None) -> dict[str, list[Problem]]:
    """Return the sets of data.validation by name, each cut to training.validation_problems.

    `report` takes a line per set about its columns.

    Raises ConfigError if training.keep_best names no set, or a set that looks like a test set.
    """
    sources = split_sets(config.data.validation) if config.data.validation else {}
    sets: dict[str, list[Problem]] = {}
    for name, source in sources.items():
        sets[name] = load_problems(source, report)[: config.training.validation_problems or None]
    if config.training.keep_best:
        _check_keep_best(config, sources, sets)
    return sets


def _check_keep_best(
    config: Config, sources: Mapping[str, str], sets: Mapping[str, list[Problem]]
) -> None:
    best = config.training.keep_best
    if not sets or not config.training.validate_every:
        missing = "data.validation=FILE" if not sets else "training.validate_every=N"
        raise ConfigError(f"training.keep_best={best} chooses among validations; add {missing}")
    if best != MEAN and best not in sets:
        hint = did_you_mean(best, [*sets, MEAN])
        raise ConfigError(f"training.keep_best={best} is not a validation set; {hint}")
    for name in sets if best == MEAN else [best]:
        if evidence := find_test_set_evidence(sources[name], sets[name]):
            raise ConfigError(
                f"training.keep_best={best}: {evidence}; the score on a test set is biased if it "
                "chose the checkpoint; choose by problems held out from the training data"
            )


def validation_due(training: TrainingConfig, number: int) -> bool:
    """Whether the model is validated after step `number`: every validate_every-th and the last."""
    every = training.validate_every
    return number == training.steps or (every > 0 and number % every == 0)


def num_answers(config: Config, sets: Mapping[str, Sequence[Problem]]) -> int:
    """Return how many responses the last pass of a validation has, at least 1."""
    return max(1, config.training.validation_samples * sum(map(len, sets.values())))


def validate_sets(
    method: Method,
    sets: Mapping[str, Sequence[Problem]],
    kept: ValidationAnswers | None = None,
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


def goal_met(config: Config, lines: Iterable[Mapping[str, float]]) -> bool:
    """Whether one of these lines of metrics has an accuracy of at least training.stop_at."""
    goal = config.training.stop_at
    return goal is not None and any(line.get(f"{PREFIX}accuracy", -1.0) >= goal for line in lines)


class BestStep:
    """The step with the best validation by `training.keep_best`; `step` is None if there is none.

    Best is the highest accuracy, or the lowest loss where there is no accuracy; the first wins.
    A resumed run finds it in the lines of metrics.jsonl.
    """

    def __init__(self, config: Config, num_sets: int, lines: Iterable[Mapping[str, float]]) -> None:
        self.name = config.training.keep_best
        self.prefix = PREFIX if self.name == MEAN or num_sets == 1 else f"{PREFIX}{self.name}/"
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
        if accuracy is not None:
            value = accuracy
        elif loss is not None:
            value = -loss
        else:
            raise RunError(
                f"training.keep_best={self.name}: the validation has neither accuracy nor loss"
            )
        if value > self.value:
            self.step = step
            self.value = value
