"""How a validation samples: training.validation_* as passes over the problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from postgrad.config.schema import Config
from postgrad.methods.ports import Ports
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Sampling, make_sampling, trajectory_seed
from postgrad.rollout.respond import STEP, Answer, respond
from postgrad.types import Batch

PART = "reward/"


@dataclass(frozen=True)
class ValidationPass:
    """One pass over the validation problems. `name` is that of its metric, `validation/NAME`."""

    name: str
    sampling: Sampling
    samples: int


def validation_passes(config: Config) -> list[ValidationPass]:
    """Return the passes of a validation.

    Without training.validation_temperature there are two: one greedy response per problem, and
    training.validation_samples at the rollout temperature.
    """
    training = config.training
    greedy = make_sampling(config.rollout, 0.0)
    temperature = training.validation_temperature
    if temperature == 0.0:
        return [ValidationPass("accuracy", greedy, 1)]
    sampled = replace(make_sampling(config.rollout, temperature), top_p=training.validation_top_p)
    if temperature is not None:
        return [ValidationPass("accuracy", sampled, training.validation_samples)]
    return [
        ValidationPass("accuracy", greedy, 1),
        ValidationPass("sampled_accuracy", sampled, training.validation_samples),
    ]


def mean_score(answers: Sequence[Answer]) -> float:
    """Return the mean score; a failure counts as 0."""
    return sum(answer.score for answer in answers) / len(answers)


def batch_answers(
    batches: Sequence[Batch], find: Callable[[str], Problem], seed: int
) -> list[Answer]:
    """Return the scored rows of batches as answers, ordered by uid and sample."""
    answers: list[Answer] = []
    for batch in batches:
        parts = [name for name in batch.rows if name.startswith(PART)]
        for i, tokens in enumerate(batch.response.split()):
            failure = batch.rows["failure"][i]
            values = {name.removeprefix(PART): float(batch.rows[name][i]) for name in parts}
            known = {name: value for name, value in values.items() if value == value}
            kind, _, reason = failure.partition(": ")
            uid = batch.rows["uid"][i]
            sample = int(batch.rows["index"][i])
            text = batch.rows["text"][i]
            answers.append(
                Answer(
                    problem=find(uid),
                    sample=sample,
                    seed=trajectory_seed(seed, STEP, uid, sample),
                    tokens=tokens.tolist(),
                    text=text,
                    policy_text=text,
                    finish=batch.rows["finish"][i],
                    verdict=Failure(kind, reason)
                    if failure
                    else Score(float(batch.rows["reward"][i]), known),
                )
            )
    return sorted(answers, key=lambda answer: (answer.problem.uid, answer.sample))


def validate(
    ports: Ports, config: Config, problems: Sequence[Problem]
) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """Return the answers of each pass over the problems, and the metrics."""
    by_pass: dict[str, list[Answer]] = {}
    metrics: dict[str, float] = {}
    num_failures = 0
    for one in validation_passes(config):
        answers = respond(
            ports.engine,
            ports.scorer,
            ports.encoder,
            problems,
            one.sampling,
            one.samples,
            config.seed,
            ports.turns,
        )
        by_pass[one.name] = answers
        metrics[f"validation/{one.name}"] = mean_score(answers)
        num_failures += sum(isinstance(answer.verdict, Failure) for answer in answers)
    if num_failures:
        metrics["validation/failures"] = float(num_failures)
    return by_pass, metrics
