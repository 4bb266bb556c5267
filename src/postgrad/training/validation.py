"""Validation of a run: every named set by the method's own validation, and which checkpoint was best by one of them."""

from collections.abc import Iterable, Mapping, Sequence

from postgrad.config.schema import Config
from postgrad.data.problems import load_problems
from postgrad.data.sets import find_test_set_evidence, split_sets
from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.methods.base import Method
from postgrad.problem import Problem

MEAN = "mean"  # training.keep_best=mean: by all sets together
PREFIX = "validation/"


def load_sets(config: Config) -> dict[str, list[Problem]]:
    """The sets of data.validation by name, the first problems of each; refuses to keep the best checkpoint by a test set."""
    places = split_sets(config.data.validation) if config.data.validation else {}
    sets = {
        name: load_problems(place)[: config.training.validation_problems]
        for name, place in places.items()
    }
    best = config.training.keep_best
    if not best:
        return sets
    if not sets or not config.training.validate_every:
        missing = "data.validation=FILE" if not sets else "training.validate_every=N"
        raise ConfigError(f"training.keep_best={best} chooses among validations; add {missing}")
    if best != MEAN and best not in sets:
        raise ConfigError(
            f"training.keep_best={best} is none of the validation sets; {did_you_mean(best, [*sets, MEAN])}"
        )
    for name in sets if best == MEAN else [best]:
        if sign := find_test_set_evidence(places[name], sets[name]):
            raise ConfigError(
                f"training.keep_best={best}: {sign}, and a model chosen by a test set has no honest score on it; "
                "choose by problems held out from the training data"
            )
    return sets


def validate_sets(method: Method, sets: Mapping[str, Sequence[Problem]]) -> dict[str, float]:
    """One set: what the method says. Several: the same as validation/NAME/..., and as validation/... the plain mean over the sets."""
    results = {name: method.validate(problems) for name, problems in sets.items()}
    if len(results) == 1:
        return next(iter(results.values()))
    out: dict[str, float] = {}
    for key in next(iter(results.values())):
        values = [result[key] for result in results.values() if key in result]
        out[key] = sum(values) / len(values)
    for name, result in results.items():
        out |= {
            f"{PREFIX}{name}/{key.removeprefix(PREFIX)}": value for key, value in result.items()
        }
    return out


def goal_met(config: Config, lines: Iterable[Mapping[str, float]]) -> bool:
    """Whether one of these lines of metrics has the accuracy of training.stop_at."""
    goal = config.training.stop_at
    return goal is not None and any(line.get(f"{PREFIX}accuracy", -1.0) >= goal for line in lines)


class Best:
    """The step with the best validation so far by `training.keep_best`: highest accuracy, else lowest loss; the first of equals.

    It has no state of its own: a resumed run reads it from the metrics.
    """

    def __init__(self, config: Config, num_sets: int, lines: Iterable[Mapping[str, float]]) -> None:
        self.name = config.training.keep_best
        self.prefix = PREFIX if self.name == MEAN or num_sets == 1 else f"{PREFIX}{self.name}/"
        self.step: int | None = None
        self.value = float("-inf")
        for line in lines:
            if any(key.startswith(PREFIX) for key in line):
                self.see(int(line["step"]), line)

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of a validation. The model a run starts from is no checkpoint of it, so step 0 does not count."""
        if not self.name or step == 0:
            return
        accuracy, loss = metrics.get(f"{self.prefix}accuracy"), metrics.get(f"{self.prefix}loss")
        if accuracy is None and loss is None:
            raise RunError(
                f"training.keep_best={self.name}: its validation gives neither accuracy nor loss"
            )
        value = accuracy if accuracy is not None else -float(loss or 0.0)
        if value > self.value:
            self.step, self.value = step, value
