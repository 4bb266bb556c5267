"""The result of a translation: the command, and what has no equivalent."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

SET_IT = "set it: "  # begins the line of a setting whose value is no literal
_TRACKERS = ("wandb", "tensorboard")
# A variable of the shell in braces, and a value with variables and nothing else of the shell.
_BRACED = re.compile(r"\$\{(\w+)\}(?!\w)")
_ARGUMENT = re.compile(r"\$(?:[\d@*]|\{\d+\})")
_VARIABLES = re.compile(r"(?=.*\$)(?:[^$`\"\\!]|\$\w+)*")


@dataclass
class Translation:
    """The settings of a script, and what they are here. All values are text.

    Attributes:
        recipe: the recipe of the command.
        settings: settings of the script that nothing has translated yet.
        overrides: the settings of the command.
        missing: lines "KEY=VALUE: REASON" about what the command does not do.
    """

    recipe: str
    settings: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command line, as it is pasted into a shell."""
        overrides = [f"{key}={_quoted(value)}" for key, value in self.overrides.items()]
        return " \\\n  ".join([f"postgrad train {self.recipe}", *overrides])

    def take(self, name: str, default: str = "") -> str:
        """Return the value of a setting, given its name or its last parts, as translated."""
        found = [key for key in self.settings if f".{key}".endswith(f".{name}")]
        values = [self.settings.pop(key) for key in found]
        return values[-1] if values else default

    def take_bool(self, name: str) -> bool:
        """Return whether a setting is true, as translated."""
        return self.take(name).lower() == "true"

    def take_count(self, name: str) -> int | None:
        """Return a setting's whole number, as translated; None without one.

        A text, such as a variable that the script does not set, stays among the settings.
        """
        keys = [key for key in self.settings if f".{key}".endswith(f".{name}")]
        if not keys or not self.settings[keys[-1]].isdecimal():
            return None
        return int(self.take(name))

    def take_section(self, name: str) -> dict[str, str]:
        """Return the settings of a section by their full names, as translated."""
        found = {key: value for key, value in self.settings.items() if f".{name}." in f".{key}"}
        for key in found:
            del self.settings[key]
        return found

    def miss(self, key: str, value: str, reason: str = "") -> None:
        """List a setting that the command does not have, or that means something else."""
        self.missing.append(f"{key}={value}: {reason}" if reason else f"{key}={value}")

    def track(self, names: Sequence[str]) -> str:
        """Set the trackers among the names; return the others."""
        trackers = [name for name in dict.fromkeys(names) if name in _TRACKERS]
        if trackers:
            is_list = len(trackers) > 1
            self.overrides["track"] = f"[{','.join(trackers)}]" if is_list else trackers[0]
        return ",".join(name for name in names if name not in _TRACKERS)

    def drop_idle(self) -> None:
        """Drop what other settings make idle: epochs beside steps, LoRA without a rank."""
        if "training.steps" in self.overrides:
            self.overrides.pop("training.epochs", None)
        if self.overrides.get("model.lora.rank", "0") == "0":
            for name in [name for name in self.overrides if name.startswith("model.lora.")]:
                del self.overrides[name]


def has_argument(value: str) -> bool:
    """Return whether the script's own arguments, such as $1, are part of the value."""
    return bool(_ARGUMENT.search(value))


def has_variable(value: str) -> bool:
    """Return whether the shell fills something in when the command is pasted."""
    return bool(_VARIABLES.fullmatch(_BRACED.sub(r"$\1", value)))


def _quoted(value: str) -> str:
    """Return the value as a shell reads it: only variables are filled in by it."""
    if has_variable(value):
        value = _BRACED.sub(r"$\1", value)
        plain = value.replace("$", "")
        return value if shlex.quote(plain) == plain else f'"{value}"'
    return shlex.quote(value)


def lower_bool(value: str) -> str:
    """Return the value; True and False as YAML writes them."""
    return value.lower() if value in ("True", "False") else value
