"""The settings of `postgrad eval`: training's own keys, where an evaluation has use for them, and a few more."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from postgrad.config.compose import read_words
from postgrad.config.schema import (
    OVERLONG,
    ClusterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    setting,
)
from postgrad.errors import ConfigError


@dataclass
class EvalModel(ModelConfig):
    dtype: str = setting(
        "auto",
        "compute type; auto: float32 on a CPU, else bfloat16",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = setting(0, "CPU threads of torch; 0: torch's own choice", at_least=0)


@dataclass
class EvalData:
    sets: str = setting(
        MISSING, "problem files with commas between, each a set of its own; NAME=FILE names one"
    )
    limit: int = setting(0, "first problems of each set; 0: all", at_least=0)
    template: str = setting(
        "auto", "how messages become a prompt", choices=("auto", "chat", "plain")
    )
    template_options: dict[str, Any] = setting(
        {}, "values the chat template reads, e.g. data.template_options.enable_thinking=false"
    )
    prompt_style: str = setting(
        "own", "what stands around the question, as in training; docs/data.md has the table"
    )
    max_prompt_tokens: int | None = setting(
        None, "longest prompt; null: what the model's context has room for", at_least=1
    )
    overlong: str = setting(
        "error",
        "longer prompts: refuse, drop, or cut left, right or in the middle, as in training",
        choices=OVERLONG,
    )


@dataclass
class EvalRollout(RolloutConfig):
    samples: int = setting(1, "responses to each problem", at_least=1)
    temperature: float | None = setting(  # type: ignore[assignment]
        None, "0 is greedy; null: 0 for one sample, 1 for more", at_least=0.0
    )
    batch: int = setting(
        0, "problems handed to the engine at once; 0: 32 responses' worth on a CPU, 1024 elsewhere; a killed evaluation repeats one batch",
        at_least=0,
    )  # fmt: skip


@dataclass
class EvalReward(RewardConfig):
    pass_score: float = setting(1.0, "a response counts as right from this score on")


@dataclass
class EvalConfig:
    """One evaluation: a model, its sets, how it answers and how it is judged."""

    out: str = setting("", "folder of the results; empty: a name from the model and the settings")
    seed: int = setting(0, "everything random follows from it", at_least=0)
    model: EvalModel = field(default_factory=EvalModel)
    data: EvalData = field(default_factory=EvalData)
    rollout: EvalRollout = field(default_factory=EvalRollout)
    reward: EvalReward = field(default_factory=EvalReward)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


SECTIONS = {
    f.name: f.type for f in dataclasses.fields(EvalConfig) if dataclasses.is_dataclass(f.type)
}
SHORT = {"n": "rollout.samples", "data": "data.sets", "workers": "reward.workers"}
# What a run's own configuration says about these holds for its evaluation, unless a word says otherwise.
FROM_RUN = (
    "data.template",
    "data.template_options",
    "data.prompt_style",
    "rollout.max_response_tokens",
    "rollout.stop",
    "rollout.tools",
    "rollout.max_turns",
    "rollout.tool_timeout_s",
    "rollout.tool_chars",
    "reward.verifier",
    "model.trust_remote_code",
)


def read_settings(path: str, overrides: list[str], run: dict[str, Any] | None = None) -> EvalConfig:
    """The checked settings of `postgrad eval MODEL key=value ...`; `path` is the model's, `run` the configuration it was trained with."""
    base: dict[str, Any] = {}
    for key in FROM_RUN if run else ():
        section, leaf = key.split(".")
        if run is not None and leaf in run.get(section, {}):
            base.setdefault(section, {})[leaf] = run[section][leaf]
    base.setdefault("model", {})["path"] = path
    plain: list[str] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        full = full_key(key)
        if full in ("data.sets", "out") and equals:  # paths are taken as they are, commas and all
            section, _, leaf = full.rpartition(".")
            (base.setdefault(section, {}) if section else base)[leaf] = value
        elif full == "greedy" and value.lower() == "true":
            plain.append("rollout.temperature=0")
        elif full == "model.path":
            raise ConfigError(f"{word}: the model is the first word: postgrad eval MODEL data=FILE")
        else:
            plain.append(f"{full}{equals}{value}")
    if "data.sets" not in [full_key(word.partition("=")[0]) for word in overrides]:
        raise ConfigError(
            "which problems? postgrad eval MODEL data=FILE; several with commas between, or arithmetic:LEVEL"
        )
    config: EvalConfig = read_words(EvalConfig, plain, base)
    if config.rollout.temperature is None:
        config.rollout.temperature = 0.0 if config.rollout.samples == 1 else 1.0
    if config.rollout.temperature == 0.0 and config.rollout.samples > 1:
        raise ConfigError(
            f"n={config.rollout.samples} with temperature=0 would give each answer {config.rollout.samples} times; "
            "use n=1, or a temperature above 0"
        )
    return config


def full_key(key: str) -> str:
    """A key with its section: temperature is rollout.temperature, n is rollout.samples. Others are returned as they are."""
    if key in SHORT:
        return SHORT[key]
    if "." in key or key in {f.name for f in dataclasses.fields(EvalConfig)}:
        return key
    owners = [
        name for name, kind in SECTIONS.items() if key in {f.name for f in dataclasses.fields(kind)}
    ]  # type: ignore[arg-type]
    return f"{owners[0]}.{key}" if len(owners) == 1 else key
