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
        "a run folder, a parquet file of rollouts, or results of postgrad eval",
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
    model: EntropyModel = field(default_factory=EntropyModel)


MODEL_KEYS = ("device", "dtype", "threads", "trust_remote_code")  # short for model.KEY


def read_settings(model_path: str, overrides: Sequence[str]) -> EntropyConfig:
    """Return the checked settings.

    Raises: ConfigError for an unknown key or a bad value.
    """
    base: dict[str, Any] = {"model": {"path": model_path}}
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
