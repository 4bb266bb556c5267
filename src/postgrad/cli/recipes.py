"""`postgrad recipes [NAME|FILE.yaml]`: lists the recipes, or the settings of one recipe."""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import yaml

from postgrad.config.compose import RECIPES, compose, recipe_names
from postgrad.errors import Missing, UnknownName, did_you_mean

WIDTH = 110  # columns of the list
MOST_USED = ("grpo", "sft", "dpo", "ppo", "dapo", "gspo", "luffy", "bupo", "distill", "kto")
# The settings that people change.
COMMON = (
    "seed",
    "model.path",
    "model.dtype",
    "model.lora.rank",
    "data.train",
    "data.validation",
    "data.max_prompt_tokens",
    "rollout.engine",
    "rollout.samples",
    "rollout.temperature",
    "rollout.max_response_tokens",
    "reward.verifier",
    "optimizer.lr",
    "training.steps",
    "training.epochs",
    "training.problems_per_step",
    "training.validate_every",
    "training.checkpoint_every",
    "cluster.backend",
    "method.kl",
)


def recipes(name: str | None = None, *, all_: bool = False) -> int:
    """List the recipes, or show one recipe: its origin, and the settings that people change.

    Args:
        name: the recipe to show, or your own file (FILE.yaml)
        --all: show every setting of the recipe
    """
    if name is None:
        if all_:
            raise Missing("--all shows the settings of a recipe; name one", at="RECIPE")
        print(list_recipes())
        return 0
    if name not in recipe_names() and not name.endswith(".yaml"):
        raise UnknownName(
            f"unknown recipe {name}; {did_you_mean(name, recipe_names())}", at="RECIPE"
        )
    from postgrad.methods import find_method

    config = compose(
        name, ["name=NAME"], lambda method: find_method(method).Settings, complete=False
    )
    print("\n".join(f"# {line}" for line in _comment(name)))
    lines = _setting_lines(config, "")
    shown = [key for key in lines if all_ or key in COMMON]
    for key in shown:
        print(lines[key])
    if len(shown) < len(lines):
        print(f"--all shows the other {len(lines) - len(shown)} settings")
    return 0


def list_recipes() -> str:
    """Return the recipes in lines: the most used ones, then the others by method.

    A recipe and its variant for a small machine, NAME_small, share a line.
    """
    names = recipe_names()
    groups: dict[str, list[str]] = {"most used": list(MOST_USED)}
    for name in names:
        is_variant = name.endswith("_small") and name.removesuffix("_small") in names
        if name not in MOST_USED and not is_variant:
            groups.setdefault(_method_of(name), []).append(name)
    labels = {name: name for group in groups.values() for name in group}
    for name in labels:
        if f"{name}_small" in names:
            labels[name] = f"{name}, {name}_small"
    lines: list[str] = []
    for title, group in groups.items():
        lines += ["", title] if lines else [title]
        width = max(len(labels[name]) for name in group) + 2
        for name in group:
            text = textwrap.shorten(_comment(name)[0], WIDTH - width, placeholder=" ...")
            lines.append(f"  {labels[name]:<{width}}{text}")
    return "\n".join(lines)


def _method_of(name: str) -> str:
    """Return the method of a recipe; recipes that extend another one may not name it."""
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) or {}
    method = content.get("method", {}).get("name")
    parents = [parent for parent in content.get("defaults", []) if parent != "_self_"]
    return method or (_method_of(parents[0]) if parents else "all methods")


def _setting_lines(section: Any, prefix: str) -> dict[str, str]:
    """Return `key=value` and the help text of each setting of a section, by key."""
    lines: dict[str, str] = {}
    for spec in dataclasses.fields(section):
        key = f"{prefix}{spec.name}"
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            lines |= _setting_lines(value, f"{key}.")
            continue
        text = spec.metadata.get("help", "")
        if choices := spec.metadata.get("choices", ()):
            text = f"{text} ({', '.join(choice or 'empty' for choice in choices)})"
        lines[key] = f"{f'{key}={value}':<44} {text}"
    return lines


def _comment(name: str) -> list[str]:
    """Return the comment lines of a recipe's file; `name` may be a file of the user."""
    file = Path(name) if name.endswith(".yaml") else RECIPES / f"{name}.yaml"
    lines = file.read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")] or [""]
