"""Settings of `postgrad eval`: the keys of training that an evaluation uses, and a few more."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.config.compose import compose_section
from postgrad.config.overrides import Override, keys_in, rename
from postgrad.config.schema import (
    AGENT,
    ENVIRONMENT,
    OVERLONG,
    AgentConfig,
    ClusterConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    setting,
)
from postgrad.config.setting import REQUIRED
from postgrad.errors import Conflict, Missing, WrongValue


@dataclass
class EvalModel(ModelConfig):
    dtype: str = setting(
        "auto",
        "compute dtype; auto: that of the run, else float32 on a CPU and bfloat16 elsewhere",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = setting(0, "CPU threads of torch; 0: torch's default", at_least=0)


@dataclass
class EvalData:
    sets: str = setting(
        REQUIRED, "problem files separated by commas; each is one set; NAME=FILE names a set"
    )
    limit: int = setting(0, "use only the first problems of each set; 0: all", at_least=0)
    template: str = setting(
        "auto", "how messages become a prompt", choices=("auto", "chat", "plain")
    )
    template_options: dict[str, Any] = setting(
        {}, "variables of the chat template, e.g. data.template_options.enable_thinking=false"
    )
    prompt_style: str = setting(
        "own", "text around the question, as in training; docs/data.md has the list"
    )
    max_prompt_tokens: int | None = setting(
        None, "maximum prompt length; null: the model's context minus the response", at_least=1
    )
    overlong: str = setting(
        "error",
        "prompts that are too long: refuse, drop, or truncate left, right or in the middle",
        choices=OVERLONG,
    )


@dataclass
class EvalRollout(RolloutConfig):
    samples: int = setting(1, "responses per problem", at_least=1)
    temperature: float | None = setting(  # type: ignore[assignment]
        None, "0 is greedy; null: 0 for one sample, 1 for more", at_least=0.0
    )
    batch: int = setting(
        0,
        "problems per call of the engine; 0: enough for 32 responses on a CPU, 1024 elsewhere; "
        "an evaluation that continues after a kill repeats at most one batch",
        at_least=0,
    )


@dataclass
class EvalReward(RewardConfig):
    pass_score: float = setting(1.0, "minimum score of a response that counts as right")


@dataclass
class EvalConfig:
    """The settings of one evaluation."""

    out: str = setting("", "output folder; empty: a name from the model and the settings")
    seed: int = setting(0, "random seed", at_least=0)
    model: EvalModel = field(default_factory=EvalModel)
    data: EvalData = field(default_factory=EvalData)
    rollout: EvalRollout = field(default_factory=EvalRollout)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig, metadata=ENVIRONMENT)
    agent: AgentConfig = field(default_factory=AgentConfig, metadata=AGENT)
    reward: EvalReward = field(default_factory=EvalReward)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


SECTIONS = {
    f.name: f.type for f in dataclasses.fields(EvalConfig) if dataclasses.is_dataclass(f.type)
}
SHORT_KEYS = {
    "n": "rollout.samples",
    "data": "data.sets",
    "workers": "reward.workers",
    "timeout_s": "reward.timeout_s",
    "environment": "environment.name",
    "agent": "agent.command",
}
# Defaults for the model of a run: these keys are read from the run's configuration.
DEFAULTS_FROM_RUN = (
    "data.template",
    "data.template_options",
    "data.prompt_style",
    "rollout.max_response_tokens",
    "rollout.stop",
    "rollout.tools",
    "rollout.max_turns",
    "rollout.tool_timeout_s",
    "rollout.tool_chars",
    "rollout.tool_format",
    "environment.name",
    "environment.options",
    "environment.weights",
    "environment.workers",
    "environment.timeout_s",
    "environment.max_chars",
    "agent.command",
    "agent.workers",
    "agent.timeout_s",
    "agent.max_calls",
    "reward.verifier",
    "model.dtype",
    "model.trust_remote_code",
)


def read_settings(
    model_path: str,
    overrides: Sequence[Override],
    run_config: dict[str, Any] | None = None,
    command: str = "eval",
) -> EvalConfig:
    """Return the checked settings of `postgrad eval MODEL key=value ...`, or of `generate`.

    `run_config` is the configuration the model was trained with, or None. It sets the defaults
    of prompts, tools and verifier; `overrides` take precedence.

    Raises: ConfigError for an unknown key, a bad value or no data.
    """
    base = _run_defaults(run_config or {})
    base.setdefault("model", {})["path"] = model_path
    remaining: list[Override] = []
    for override in overrides:
        if isinstance(override, str) and "=" not in override and Path(override).is_file():
            raise Missing(f"{override} is a file; type data={override}", at="data")
        if str(override).lower() == "greedy=true":
            override = "rollout.temperature=0"
        remaining.append(rename(override, full_key))
        if str(override).startswith("model.path="):
            raise WrongValue(
                f"{override}: the model is the first argument: postgrad {command} MODEL data=FILE"
            )
    if "data.sets" not in keys_in(remaining):
        raise Missing(
            f"no data; type postgrad {command} MODEL data=FILE, with several files separated by "
            "commas, or data=arithmetic:LEVEL",
            at="data",
        )
    config: EvalConfig = compose_section(EvalConfig, remaining, base)
    _set_temperature(config.rollout)
    return config


def _run_defaults(run_config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that also hold for its evaluation, by section."""
    defaults: dict[str, Any] = {}
    for key in DEFAULTS_FROM_RUN:
        section, leaf = key.split(".")
        stored = run_config.get(section)
        if isinstance(stored, dict) and leaf in stored:
            defaults.setdefault(section, {})[leaf] = stored[leaf]
    return defaults


def _set_temperature(rollout: EvalRollout) -> None:
    """Replace a temperature of null; refuse several samples at temperature 0."""
    if rollout.temperature is None:
        rollout.temperature = 0.0 if rollout.samples == 1 else 1.0
    if rollout.temperature == 0.0 and rollout.samples > 1:
        raise Conflict(
            f"n={rollout.samples} with temperature=0 would give {rollout.samples} equal responses; "
            "use n=1, or a temperature above 0"
        )


def full_key(key: str) -> str:
    """Return a key with its section: rollout.temperature for temperature, rollout.samples for n.

    Unknown and ambiguous keys are returned unchanged.
    """
    if key in SHORT_KEYS:
        return SHORT_KEYS[key]
    if "." in key or key in _field_names(EvalConfig):
        return key
    sections = [name for name, section in SECTIONS.items() if key in _field_names(section)]
    return f"{sections[0]}.{key}" if len(sections) == 1 else key


def _field_names(section: Any) -> set[str]:
    return {leaf.name for leaf in dataclasses.fields(section)}
