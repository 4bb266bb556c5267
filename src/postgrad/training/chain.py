"""A run that needs another one before it: SFT then RL, a warm-up then the method. One command, two run folders, both resumable."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from postgrad.config.compose import compose
from postgrad.config.schema import Config, JudgeConfig
from postgrad.methods import find_method
from postgrad.training.driver import Result, train
from postgrad.training.report import Reporter
from postgrad.verifiers.scorer import LLM_JUDGE

CARRIED = (
    "model",
    "data",
    "reward",
    "cluster",
)  # sections that the first run shares with the second


def train_chain(config: Config, reporter: Reporter) -> Result:
    """Run `first` to its end if there is one, then this run from the model it left."""
    if not config.warmup.recipe:
        return train(config, reporter)
    first = first_run(config)
    result = train_chain(first, reporter)
    if result.interrupted and result.step < first.training.steps:
        return result
    if result.step == 0:  # its model was good enough before the first step
        return train(dataclasses.replace(config, model=first.model), reporter)
    path = str(result.folder / "checkpoints" / f"step-{result.step}" / "policy")
    return train(
        dataclasses.replace(config, model=dataclasses.replace(config.model, path=path)), reporter
    )


def first_run(config: Config) -> Config:
    """The configuration of the run that comes before: its own recipe, on this run's model and data."""
    carried = {name: dataclasses.asdict(getattr(config, name)) for name in CARRIED}
    carried["rollout"] = {"max_response_tokens": config.rollout.max_response_tokens}
    overrides = [f"{key}={json.dumps(value)}" for key, value in _leaves(carried, "")]
    overrides += [
        f"seed={config.seed}",
        f"runs={json.dumps(config.runs)}",
        f"name={json.dumps(config.name + '-first')}",
    ]
    first = compose(
        config.warmup.recipe,
        [*overrides, *config.warmup.overrides],
        lambda name: find_method(name).Settings,
    )
    if not find_method(first.method.name).has_thoughts:
        first.reward.judge.monitor = ""  # the second run's, which reads thoughts
    if first.reward.verifier != LLM_JUDGE:
        first.reward.judge = JudgeConfig(
            monitor=first.reward.judge.monitor
        )  # the others are the second run's
    return first


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
