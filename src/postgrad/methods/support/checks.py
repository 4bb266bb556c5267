"""Settings that cannot work, whatever the method: refused in one line, before anything is written. All raise ConfigError."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from postgrad.config.compose import written
from postgrad.config.schema import Config, LoraConfig
from postgrad.errors import ConfigError
from postgrad.rollout.kinds import find_engine


def refuse_unread(
    section: str, settings: Any, names: Sequence[str], why: str, fix: str = ""
) -> None:
    """Refuse the first of these settings that somebody wrote and that is not at its default: `why` it has no effect, what to change.

    What a recipe of the package sets may be switched off as a whole, e.g. reinforce_pp with method.kl=none.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        if field.name in names and value != default and written(settings, field.name):
            leave = f"leave it at {_word(default)}"
            raise ConfigError(
                f"{section}.{field.name}={_word(value)} has no effect {why}; {f'{fix}, or {leave}' if fix else leave}"
            )


def _word(value: Any) -> str:
    """A value as it is written behind a key."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def engine_apart(config: Config) -> bool:
    """Whether the engine keeps weights of its own."""
    cluster = config.cluster
    if cluster.engine_apart or cluster.engines > 0:
        return True
    return not find_engine(config.rollout.engine).shares_weights


def check_sampling(method: Any) -> None:
    """Refuse what would make the sampled policy another than the one that the loss prices."""
    rollout = method.config.rollout
    filters = {
        "rollout.top_p": rollout.top_p != 1.0,
        "rollout.top_k": rollout.top_k != 0,
        "rollout.min_p": rollout.min_p != 0.0,
    }
    for key, on in filters.items():
        if on and method.trains_on_samples:
            raise ConfigError(
                f"{key} changes what is sampled but not the log-probs the loss uses, so {method.settings.name} refuses it; remove {key}"
            )
    dropout = method.config.model.lora.dropout
    if not 0 <= dropout < 1:
        raise ConfigError(
            f"model.lora.dropout={dropout} is no share; use a number of at least 0 and below 1"
        )
    if dropout and method.trains_on_samples:
        raise ConfigError(
            f"model.lora.dropout={dropout} makes the policy that is trained another than the one that sampled, "
            f"so {method.settings.name} refuses it; remove it"
        )


def check_monitor(method: Any) -> None:
    """Refuse a monitor of thoughts where there are none."""
    if (monitor := method.config.reward.judge.monitor) and not method.has_thoughts:
        raise ConfigError(
            f"reward.judge.monitor={monitor} foretells scores from thoughts, and {method.settings.name} knows none; remove it, "
            "or use method=classmate"
        )


def check_tools(method: Any) -> None:
    """Refuse tools where nobody would call them, and their settings without them."""
    rollout = method.config.rollout
    if rollout.tools and not method.takes_tools:
        raise ConfigError(
            f"rollout.tools={list(rollout.tools)}: {method.settings.name} has no turns with tools; remove it, or use grpo"
        )
    if not rollout.tools:
        names = ["max_turns", "tool_timeout_s", "tool_chars"]
        refuse_unread("rollout", rollout, names, "without tools", "add rollout.tools=[calculator]")


def check_staleness(method: Any) -> None:
    """Refuse rollouts that run ahead where nobody samples, where they cannot, or where nothing corrects for the older weights."""
    stale, cluster = method.config.rollout.staleness, method.config.cluster
    if not stale:
        return
    if not method.trains_on_samples:
        raise ConfigError(
            f"rollout.staleness={stale}: {method.settings.name} trains on nothing it samples; remove it"
        )
    remote = find_engine(method.config.rollout.engine).remote
    if not (cluster.engine_apart or cluster.engines or remote):
        raise ConfigError(
            f"rollout.staleness={stale} samples while the policy is trained; add cluster.engine_apart=true with cluster.backend=process, "
            "or cluster.engines=1 with cluster=ray"
        )
    if getattr(method.settings, "correction", "none") == "none":
        raise ConfigError(
            f"rollout.staleness={stale} trains on rows of older weights; method.correction=none would leave that uncorrected: remove it"
        )


def check_numbers(config: Config) -> None:
    """Refuse numbers that do not fit each other."""
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"optimizer.betas={betas} cannot be used; AdamW wants two numbers of at least 0 and below 1, e.g. [0.9,0.999]"
        )
    training = config.training
    if training.updates_per_step > training.problems_per_step:
        raise ConfigError(
            f"training.updates_per_step={training.updates_per_step} exceeds training.problems_per_step={training.problems_per_step}; "
            "an update needs at least one problem"
        )


def check_read(config: Config) -> None:
    """Refuse settings that nothing would read beside the others: who writes one believes that it works."""
    lora = config.model.lora
    if not engine_apart(config):
        refuse_unread(
            "rollout",
            config.rollout,
            ["max_gap"],
            "on an engine that samples from the trainer's own weights",
        )
    if not lora.rank and (
        lora.alpha != LoraConfig.alpha or lora.targets != LoraConfig.targets or lora.dropout
    ):
        raise ConfigError(
            "model.lora.* has no effect with model.lora.rank=0, which trains the model itself; add model.lora.rank=16"
        )
    if config.optimizer.schedule == "constant" and config.optimizer.final_lr_ratio:
        raise ConfigError(
            f"optimizer.final_lr_ratio={config.optimizer.final_lr_ratio:g} has no effect with optimizer.schedule=constant; "
            "use linear or cosine"
        )
    if config.warmup.overrides and not config.warmup.recipe:
        raise ConfigError(
            "warmup.overrides are of the run before this one, and warmup.recipe names none; add it, e.g. warmup.recipe=sft"
        )
    if (goal := config.training.stop_at) is not None and not (
        config.data.validation and config.training.validate_every
    ):
        missing = "training.validate_every=N" if config.data.validation else "data.validation=FILE"
        raise ConfigError(
            f"training.stop_at={goal:g} waits for the accuracy of a validation; add {missing}"
        )
