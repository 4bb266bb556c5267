"""One recipe per kind of method: `make check` runs these, make test-nightly runs all."""

from collections.abc import Collection, Sequence
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


def recipe_params(names: Sequence[str], slow: Collection[str] = ()) -> list[Any]:
    """Return parameters: CORE_RECIPES have no mark, `slow` ones are slow, the others nightly."""

    def param(name: str) -> Any:
        mark = pytest.mark.slow if name in slow else pytest.mark.nightly
        return name if name in CORE_RECIPES else pytest.param(name, marks=mark)

    return [param(name) for name in names]
