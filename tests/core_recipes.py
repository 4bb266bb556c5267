"""One recipe per kind of method: `make check` runs these, `make test` runs all."""

from collections.abc import Sequence
from typing import Any

import pytest

CORE_RECIPES = (
    "bupo",
    "classmate",
    "distill",
    "dpo",
    "exgrpo",
    "grpo",
    "kto",
    "luffy",
    "online_dpo",
    "ppo",
    "reward_model",
    "sft",
)


def recipe_params(names: Sequence[str]) -> list[Any]:
    """The names as parameters of a test; all but CORE_RECIPES are marked slow."""
    slow = pytest.mark.slow
    return [name if name in CORE_RECIPES else pytest.param(name, marks=slow) for name in names]
