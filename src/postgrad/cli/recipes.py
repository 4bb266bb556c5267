"""`postgrad recipes [NAME]`: what there is, and every setting of one."""

import dataclasses
from typing import Any

from postgrad.config.compose import RECIPES, compose, recipe_names
from postgrad.errors import ConfigError, did_you_mean


def run(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(
            "usage: postgrad recipes [NAME]\n\nLists the recipes, or shows one: its origin and every setting with value and meaning."
        )
        return 0
    if not words:
        width = max(map(len, recipe_names())) + 2
        for name in recipe_names():
            print(f"  {name:<{width}}{_comment(name)[0]}")
        return 0
    name = words[0]
    if name not in recipe_names():
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
    if dataclasses.is_dataclass(value):
        for inner in dataclasses.fields(value):
            _show(inner, getattr(value, inner.name), f"{prefix}{spec.name}.")
        return
    choices = spec.metadata.get("choices", ())
    print(
        f"{f'{prefix}{spec.name}={value}':<44} {spec.metadata.get('help', '')}{f' ({chr(44).join(choices)})' if choices else ''}"
    )


def _comment(name: str) -> list[str]:
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")] or [""]
