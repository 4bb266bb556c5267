"""A run with a warm-up run before it: one command, two run folders, both resumable.

`warmup.recipe` names the recipe of the warm-up run, for example sft. The main run starts from
the model that the warm-up run trained.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from postgrad.config.compose import compose
from postgrad.config.schema import Config, JudgeConfig
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.training.result import Result
from postgrad.verifiers.model_terms import asks_judge

SHARED_SECTIONS = ("model", "data", "reward", "cluster")  # the warm-up run takes these over


def train_with_warmup(config: Config, reporter: Reporter) -> Result:
    """Train the warm-up run if the configuration has one, then this run from its model."""
    started = run_warmup(config, reporter)
    return started if isinstance(started, Result) else train(started, reporter)


def run_warmup(config: Config, reporter: Reporter) -> Config | Result:
    """Train the warm-up run, if there is one; return the configuration of the run that follows.

    Returns the warm-up's Result instead if somebody stopped it.
    """
    if not config.warmup.recipe:
        return config
    warmup = warmup_config(config)
    result = train_with_warmup(warmup, reporter)
    if result.interrupted:
        return result
    if result.step == 0:  # the model reached training.stop_at before the first step
        model = warmup.model
    else:
        checkpoint = result.folder / "checkpoints" / f"step-{result.step}"
        model = dataclasses.replace(config.model, path=str(checkpoint / "policy"))
    return dataclasses.replace(config, model=model)


def warmup_config(config: Config) -> Config:
    """Return the configuration of the warm-up run: its own recipe on this run's model and data."""
    overrides: list[tuple[str, Any]] = []
    for name in SHARED_SECTIONS:
        overrides += _leaves(getattr(config, name), f"{name}.")
    overrides.append(("rollout.max_response_tokens", config.rollout.max_response_tokens))
    overrides += [("seed", config.seed), ("runs", config.runs), ("name", f"{config.name}-warmup")]
    warmup = compose(
        config.warmup.recipe,
        [*overrides, *config.warmup.overrides],
        lambda name: find_method(name).Settings,
    )
    if not find_method(warmup.method.name).traits.thoughts:
        warmup.reward.judge.monitor = ""  # only the main run has thoughts to monitor
    if not asks_judge(warmup.reward.verifier):  # the other judge settings are the main run's
        warmup.reward.judge = JudgeConfig(monitor=warmup.reward.judge.monitor)
    return warmup


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every setting of a section."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
