"""`postgrad recipes [NAME|FILE.yaml]`: lists the recipes, or every setting of one recipe."""

import dataclasses
from pathlib import Path
from typing import Any

from postgrad.cli.arguments import Parser
from postgrad.config.compose import RECIPES, compose, recipe_names
from postgrad.errors import ConfigError, did_you_mean

DESCRIPTION = (
    "Lists the recipes, or shows one recipe: its origin, and every setting with its value."
)


def run(argv: list[str]) -> int:
    parser = Parser("recipes [NAME|FILE.yaml]", DESCRIPTION)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the recipe to show, or your own file"
    )
    name = parser.parse(argv).name
    if name is None:
        width = max(map(len, recipe_names())) + 2
        for known in recipe_names():
            print(f"  {known:<{width}}{_comment(known)[0]}")
        return 0
    if name not in recipe_names() and not name.endswith(".yaml"):
        raise ConfigError(f"unknown recipe {name}; {did_you_mean(name, recipe_names())}")
    from postgrad.methods import find_method

    config = compose(
        name, ["name=NAME"], lambda method: find_method(method).Settings, complete=False
    )
    print("\n".join(f"# {line}" for line in _comment(name)))
    for section in dataclasses.fields(config):
        _show(section, getattr(config, section.name), "")
    return 0


def _show(spec: Any, value: Any, prefix: str) -> None:
    """Prints `key=value` and the help text; for a section, all of its settings."""
    if dataclasses.is_dataclass(value):
        for inner in dataclasses.fields(value):
            _show(inner, getattr(value, inner.name), f"{prefix}{spec.name}.")
        return
    text = spec.metadata.get("help", "")
    if choices := spec.metadata.get("choices", ()):
        text = f"{text} ({', '.join(choice or 'empty' for choice in choices)})"
    print(f"{f'{prefix}{spec.name}={value}':<44} {text}")


def _comment(name: str) -> list[str]:
    """Returns the comment lines of a recipe's file; `name` may be a file of the user."""
    file = Path(name) if name.endswith(".yaml") else RECIPES / f"{name}.yaml"
    lines = file.read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")] or [""]
