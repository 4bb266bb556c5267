"""The result of `postgrad import`, and what the translations of all projects share."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from postgrad.config.import_names import PARALLEL_SIZES, REASONS

# Learning rate schedules of transformers and verl, and the ones here.
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
TRACKERS = ("wandb", "tensorboard")
SET_IT = "set it: "  # begins the line of a setting whose value is no literal


# A variable of the shell in braces, and a value with variables and nothing else of the shell.
_BRACED = re.compile(r"\$\{(\w+)\}(?!\w)")
_VARIABLES = re.compile(r"(?=.*\$)(?:[^$`\"\\!]|\$\w+)*")


@dataclass
class Translation:
    """`recipe` and `overrides` make the command; `missing` has "key=value" lines with reasons."""

    recipe: str
    overrides: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        overrides = [f"{key}={_quoted(value)}" for key, value in self.overrides.items()]
        return " \\\n  ".join([f"postgrad train {self.recipe}", *overrides])


def has_variable(value: str) -> bool:
    """Whether the shell fills something in when the command is pasted."""
    return bool(_VARIABLES.fullmatch(_BRACED.sub(r"$\1", value)))


def _quoted(value: str) -> str:
    """Return the value as a shell reads it: only variables are filled in by it."""
    if has_variable(value):
        value = _BRACED.sub(r"$\1", value)
        plain = value.replace("$", "")
        return value if shlex.quote(plain) == plain else f'"{value}"'
    return shlex.quote(value)


def lower_bool(value: str) -> str:
    """The value; True and False as YAML writes them."""
    return value.lower() if value in ("True", "False") else value


def split_list(value: str) -> list[str]:
    """The items of a list of texts: `['a', "b"]`, `a,b` or `a`."""
    items = [item.strip().strip("\"'") for item in value.strip().strip("[]").split(",")]
    return [item for item in items if item]


def track_of(names: Iterable[str]) -> dict[str, str]:
    """The setting for those of the names that are trackers here; {} if none is."""
    trackers = [name for name in dict.fromkeys(names) if name in TRACKERS]
    if len(trackers) > 1:
        return {"track": f"[{','.join(trackers)}]"}
    return {"track": trackers[0]} if trackers else {}


def source_of(files: Sequence[str], columns: Mapping[str, str]) -> str:
    """The data source of files, with columns renamed by `OLD: NEW`."""
    names = "".join(f":{old}={new}" for old, new in columns.items() if old != new)
    return ",".join(f"{file}{names}" for file in files)


def translate_parallel(
    result: Translation, key: str, value: str, settings: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Set the workers that divide a model, or list the size; 1 divides nothing.

    Engines of vLLM have sizes of their own, which change no result. The reference and the critic
    have the policy's sizes here.
    """
    leaf = key.rpartition(".")[2]
    policys = key.replace(".ref.", ".actor.").replace("critic.", "actor_rollout_ref.actor.")
    if ".rollout." in key or value in ("1", "null") or leaf == "data_parallel_size":
        return
    if leaf in PARALLEL_SIZES and key == policys:
        result.overrides[PARALLEL_SIZES[leaf]] = value
    elif key == policys or settings.get(policys) != value:
        reason = REASONS.get(leaf, "all models of a run are divided as the policy is")
        result.missing.append(f"{key}={value}: {reason}")


def drop_epochs(overrides: dict[str, str]) -> None:
    """A number of steps goes before a number of epochs, as in TRL and verl."""
    if "training.steps" in overrides:
        overrides.pop("training.epochs", None)


def drop_lora(overrides: dict[str, str]) -> None:
    """Without a rank, the other settings of LoRA have no effect."""
    if overrides.get("model.lora.rank", "0") == "0":
        for name in [name for name in overrides if name.startswith("model.lora.")]:
            del overrides[name]
