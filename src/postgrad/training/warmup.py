"""A run with a warm-up run before it: one command, two run folders, both resumable.

`warmup.recipe` names the recipe of the warm-up run, for example sft. The main run starts from
the model that the warm-up run trained.
"""

import dataclasses
from typing import Any

from postgrad.config.compose import compose
from postgrad.config.schema import Config
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.training.result import Result

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
    shared: dict[str, Any] = {name: _values(getattr(config, name)) for name in SHARED_SECTIONS}
    shared["rollout"] = {"max_response_tokens": config.rollout.max_response_tokens}
    shared |= {"seed": config.seed, "runs": config.runs, "name": f"{config.name}-warmup"}
    warmup = compose(
        config.warmup.recipe,
        config.warmup.overrides,
        lambda name: find_method(name).Settings,
        base=shared,
    )
    if not find_method(warmup.method.name).traits.thoughts:
        warmup.reward.judge.monitor = ""  # only the main run has thoughts to monitor
    return warmup


def _values(section: Any) -> dict[str, Any]:
    """Return the values of a section's settings, nested."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _values(value)
    return values
