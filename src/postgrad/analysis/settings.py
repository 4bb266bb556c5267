"""Settings of `postgrad analyze entropy`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from postgrad.config.compose import compose_section
from postgrad.config.overrides import rename
from postgrad.config.schema import ModelConfig, setting
from postgrad.config.setting import REQUIRED
from postgrad.errors import WrongValue


@dataclass
class EntropyModel(ModelConfig):
    dtype: str = setting(
        "float32",
        "compute dtype; bfloat16 is inaccurate for entropies near 0 or near log(vocabulary)",
        choices=("float32", "bfloat16"),
    )


@dataclass
class EntropyConfig:
    """The settings of `postgrad analyze entropy`."""

    data: str = setting(
        REQUIRED,
        "a run folder, a parquet file of rollouts, results of postgrad eval, or problems to answer",
    )
    out: str = setting(
        "",
        "output folder; empty: eval/entropy in the run folder, otherwise ./entropy-MODEL",
    )
    step: int = setting(
        0, "if data is a run: the step whose rollouts are read; 0: the latest", at_least=0
    )
    rows: int = setting(64, "number of responses, evenly spaced in the data; 0: all", at_least=0)
    tolerance: float = setting(
        0.05,
        "boundary layer: fraction of the largest FFN change that counts as zero",
        at_least=0.0,
        at_most=1.0,
    )
    token_budget: int = setting(
        4096, "maximum tokens per forward pass; does not change the result", at_least=1
    )
    seed: int = setting(0, "random seed of the samples", at_least=0)
    samples: int = setting(1, "if data is problems: responses per problem", at_least=1)
    temperature: float = setting(1.0, "if data is problems: sampling temperature", at_least=0.0)
    max_response_tokens: int = setting(
        1024, "if data is problems: maximum response length", at_least=1
    )
    template: str = setting(
        "auto",
        "if data is problems: how messages become a prompt",
        choices=("auto", "chat", "plain"),
    )
    prompt_style: str = setting(
        "own", "if data is problems: text around the question, as data.prompt_style in training"
    )
    template_options: dict[str, Any] = setting(
        {}, "if data is problems: variables of the chat template, e.g. enable_thinking"
    )
    model: EntropyModel = field(default_factory=EntropyModel)


# Defaults for the model of a run: key -> (section, key) of the run's configuration.
DEFAULTS_FROM_RUN = {
    "max_response_tokens": ("rollout", "max_response_tokens"),
    "template": ("data", "template"),
    "prompt_style": ("data", "prompt_style"),
    "template_options": ("data", "template_options"),
}
MODEL_KEYS = ("device", "dtype", "threads", "trust_remote_code")  # short for model.KEY


def read_settings(
    model_path: str, overrides: Sequence[str], run_config: dict[str, Any] | None
) -> EntropyConfig:
    """Return the checked settings.

    `run_config` is the configuration the model was trained with, or None. It sets the defaults
    of the prompt and the response length; `overrides` (key=value) take precedence.

    Raises: ConfigError for an unknown key or a bad value.
    """
    base: dict[str, Any] = {"model": {"path": model_path}}
    for key, (section, leaf) in DEFAULTS_FROM_RUN.items():
        if run_config and leaf in run_config.get(section, {}):
            base[key] = run_config[section][leaf]
    for override in overrides:
        if override.startswith("model.path="):
            raise WrongValue(
                f"{override}: the model is the first argument: "
                "postgrad analyze entropy MODEL data=..."
            )
    renamed = [
        rename(override, lambda key: f"model.{key}" if key in MODEL_KEYS else key)
        for override in overrides
    ]
    return compose_section(EntropyConfig, renamed, base)
