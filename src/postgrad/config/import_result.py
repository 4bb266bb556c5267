"""The result of `postgrad import`, and what the translations of all projects share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Learning rate schedules of transformers and verl, and the ones here.
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
TRACKERS = ("wandb", "tensorboard", "trackio")
SET_IT = "set it: "  # begins the line of a setting whose value is no literal


@dataclass
class Translation:
    """`recipe` and `overrides` make the command; `missing` has "key=value" lines with reasons."""

    recipe: str
    overrides: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        overrides: list[str] = []
        for key, value in self.overrides.items():
            whole = one_value(value)
            overrides.append(f"{key}={_quoted(value)}" if whole == value else f'{key}="{whole}"')
        return " \\\n  ".join([f"postgrad train {self.recipe}", *overrides])


def one_value(value: str) -> str:
    """The value of an override; one with commas in quotes, or it would be a sweep."""
    return f"'{value}'" if "," in value and not value.startswith(("[", "{")) else value


def _quoted(value: str) -> str:
    return f"'{value}'" if re.search(r"[\s\[\]{}&;|<>*+()]", value) else value


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


def drop_epochs(overrides: dict[str, str]) -> None:
    """A number of steps goes before a number of epochs, as in TRL and verl."""
    if "training.steps" in overrides:
        overrides.pop("training.epochs", None)


def drop_lora(overrides: dict[str, str]) -> None:
    """Without a rank, the other settings of LoRA have no effect."""
    if overrides.get("model.lora.rank", "0") == "0":
        for name in [name for name in overrides if name.startswith("model.lora.")]:
            del overrides[name]
