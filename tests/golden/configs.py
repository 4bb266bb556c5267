"""Golden configurations: every recipe with four sets of overrides, and what the docs show.

`configs.jsonl` has one JSON array per line:

    ["usual", LAYER, KEY, VALUE]                a value that most configurations have
    ["set", NAME, OVERRIDES, CHANGES]           overrides, and what they usually change
    ["file", NAME, TEXT]                        a recipe file of a user
    ["case", COMMAND, RECIPE, OVERRIDES, CHANGES]    OVERRIDES: the name of a set, or a list

A layer is a command (train, eval ...), or `train METHOD` for the settings of a method. The settings
of a case are its layers, then the changes of its recipe without further overrides (the set
`plain`), of its set, and its own; later ones win. A setting that is a dictionary or a list is one
value. Lines are sorted, so that a deleted setting is a few deleted lines.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from postgrad.analysis import settings as analysis_settings
from postgrad.config.compose import compose
from postgrad.errors import ConfigError
from postgrad.evaluation import score
from postgrad.evaluation import settings as evaluation_settings
from postgrad.methods import find_method

GOLDEN = Path(__file__).parent / "configs.jsonl"
PLAIN = "plain"
METHOD_SET = "method:"  # and the method's name
ERROR = "(error)"  # the key of what a refused case has instead of settings
ABSENT = "(absent)"

Values = dict[str, Any]  # dotted key -> plain value


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with its recipe or model, and the name of a set or a tuple of overrides."""

    command: str
    recipe: str
    overrides: str | tuple[str, ...]

    def __str__(self) -> str:
        shown = f"[{self.overrides}]" if isinstance(self.overrides, str) else self.overrides
        return " ".join(
            [self.command, self.recipe, *([shown] if isinstance(shown, str) else shown)]
        )


def resolve(command: str, recipe: str, overrides: Iterable[str]) -> Values:
    """Return the settings of a command as plain values; ERROR and the line if it is refused.

    Values count here, also those of settings that have no effect with the others.
    """
    overrides = list(overrides)
    try:
        with patch("postgrad.config.compose.check_effects"):
            config = read(command, recipe, overrides)
    except ConfigError as error:
        return {ERROR: str(error)}
    values = dict(leaves(config))
    if command == "train" and not any(text.startswith("name=") for text in overrides):
        values["name"] = ""  # the automatic name has a hash of all settings
    return values


def read(command: str, recipe: str, overrides: list[str]) -> Any:
    """Return the configuration of a command. Raises ConfigError."""
    if command == "train":
        return compose(recipe, overrides, lambda name: find_method(name).Settings)
    if command == "score":
        return score.read_score_settings(recipe, overrides)
    if command == "analyze":
        return analysis_settings.read_settings(recipe, overrides)
    return evaluation_settings.read_settings(recipe, overrides, None, command)


def leaves(section: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield dotted key and value of each setting."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", json.loads(json.dumps(value))


def differences(old: Values, new: Values) -> list[tuple[str, str, str]]:
    """Return (key, old, new) as JSON texts: 1, 1.0 and true differ."""
    if ERROR in new:
        return [(ERROR, "accepted", new[ERROR])]
    keys = sorted(old.keys() | new.keys())
    pairs = [(key, show(old, key), show(new, key)) for key in keys]
    return [(key, before, after) for key, before, after in pairs if before != after]


def report(old: dict[Case, Values], new: dict[Case, Values]) -> str:
    """Return the differences of the cases of `new`, each with the cases that have it."""
    found: dict[str, list[Case]] = {}
    for case, values in new.items():
        for key, before, after in differences(old[case], values):
            found.setdefault(f"{key}: {before} -> {after}", []).append(case)
    lines: list[str] = []
    for change, where in found.items():
        lines.append(f"{change} in {len(where)} cases:")
        lines += [f"    {case}" for case in where[:3]]
    return "\n".join(lines)


def show(values: Values, key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else ABSENT


class Golden:
    """The cases of configs.jsonl and their settings."""

    def __init__(self) -> None:
        self.usual: dict[str, Values] = {}
        self.sets: dict[str, tuple[str, ...]] = {}
        self.effects: dict[str, Values] = {}
        self.files: dict[str, str] = {}
        self.changes: dict[Case, Values] = {}

    @classmethod
    def read(cls) -> "Golden":
        golden = cls()
        for line in GOLDEN.read_text().splitlines():
            kind, *fields = json.loads(line)
            if kind == "usual":
                layer, key, value = fields
                golden.usual.setdefault(layer, {})[key] = value
            elif kind == "set":
                name, overrides, golden.effects[name] = fields
                golden.sets[name] = tuple(overrides)
            elif kind == "file":
                name, golden.files[name] = fields
            else:
                command, recipe, overrides, changes = fields
                overrides = overrides if isinstance(overrides, str) else tuple(overrides)
                golden.changes[Case(command, recipe, overrides)] = changes
        return golden

    def overrides(self, case: Case) -> tuple[str, ...]:
        return self.sets[case.overrides] if isinstance(case.overrides, str) else case.overrides

    def settings(self, case: Case) -> Values:
        """Return the recorded settings of a case."""
        return self._before(case) | self.changes[case]

    def record(self, values: dict[Case, Values]) -> None:
        """Take the settings of all cases as the golden ones."""
        self.usual = usual_values(values)
        self.changes, self.effects = {}, {}
        plain_first = sorted(values, key=lambda case: case.overrides != PLAIN)
        for case in plain_first:
            name = case.overrides
            if isinstance(name, str) and name not in self.effects:
                self.effects[name] = {}
                alike = [one for one in values if one.overrides == name and name != PLAIN]
                self.effects[name] = most_common([self._changes(one, values[one]) for one in alike])
            self.changes[case] = self._changes(case, values[case])
            lost = differences(values[case], self.settings(case))
            assert not lost, (case, lost)

    def write(self) -> None:
        """Write configs.jsonl."""
        lines = [
            ["usual", layer, key, value]
            for layer, values in self.usual.items()
            for key, value in values.items()
        ]
        lines += [["set", name, self.sets[name], self.effects[name]] for name in self.effects]
        lines += [["file", name, text] for name, text in self.files.items()]
        lines += [
            ["case", case.command, case.recipe, case.overrides, changes]
            for case, changes in self.changes.items()
        ]
        order = {"usual": 0, "set": 1, "file": 2, "case": 3}
        texts = [json.dumps(line, sort_keys=True, ensure_ascii=False) for line in lines]
        texts.sort(key=lambda text: (order[json.loads(text)[0]], text))
        GOLDEN.write_text("\n".join(texts) + "\n")

    def _before(self, case: Case) -> Values:
        """Return the settings of a case without its own changes."""
        plain = self.changes.get(Case(case.command, case.recipe, PLAIN), {})
        effects = self.effects.get(case.overrides, {}) if isinstance(case.overrides, str) else {}
        usual = self.usual.get(case.command, {})
        method = (usual | plain | self.changes.get(case, {})).get("method.name")
        values = usual | self.usual.get(f"{case.command} {method}", {})
        known = values.keys() | effects.keys()
        changes = plain | effects | {"method.name": method}
        return values | {key: value for key, value in changes.items() if key in known}

    def _changes(self, case: Case, values: Values) -> Values:
        """Return what a case changes; the name of another method changes others, so it is first."""
        changes: Values = {}
        for only in (("method.name",), values):
            self.changes[case] = changes
            keys = [key for key, _, _ in differences(self._before(case), values)]
            changes |= {key: values[key] for key in keys if key in only and key in values}
        return changes


def usual_values(values: dict[Case, Values]) -> dict[str, Values]:
    """Return the most common value of each setting, by layer."""
    found: dict[str, list[Values]] = {}
    for case, settings in values.items():
        layers = {
            f"{case.command} {settings.get('method.name')}": lambda key: is_method_key(key),
            case.command: lambda key: not is_method_key(key),
        }
        for layer, belongs in layers.items():
            part = {key: value for key, value in settings.items() if belongs(key)}
            if part:
                found.setdefault(layer, []).append(part)
    return {layer: most_common(parts) for layer, parts in found.items()}


def is_method_key(key: str) -> bool:
    return key.startswith("method.") and key != "method.name"


def most_common(parts: list[Values]) -> Values:
    """Return the most common value of each key that more than half of the parts have."""
    counts: dict[str, Counter[str]] = {}
    for part in parts:
        for key in part:
            counts.setdefault(key, Counter())[show(part, key)] += 1
    return {
        key: json.loads(min(texts, key=lambda text: (-texts[text], text)))
        for key, texts in counts.items()
        if sum(texts.values()) > len(parts) / 2
    }
