"""Settings that cannot work together are refused before the run; the possible ones are accepted."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from method_runs import RECIPES, SMALL, overrides_for
from refused import refused
from tables import table
from tiny_runs import EXAMPLES, SELF_DISTILL, config_of, tree

from postgrad.config.check import check_effects
from postgrad.config.overrides import keys_in
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.prepare import prepare
from postgrad.training.report import Reporter

WORDS = {
    "EXAMPLES": str(EXAMPLES),
    "SEPARATE": "cluster.backend=process cluster.engines=1",
    "SELF_DISTILL": " ".join(SELF_DISTILL),
}


def check(recipe: str, model, *overrides: str) -> None:
    config = config_of(recipe, model, *SMALL, *overrides_for(recipe), *overrides)
    find_method(config.method.name)(config).check()


@cache
def composed(recipe: str, model: Path) -> Config:
    return config_of(recipe, model, *SMALL, *overrides_for(recipe))


def check_quickly(recipe: str, model: Path, *overrides: str) -> None:
    """As `check`, with words of known keys put into a recipe that is composed once."""
    config = copy.deepcopy(composed(recipe, model))
    for word in overrides:
        key, _, value = word.partition("=")
        *path, leaf = key.split(".")
        owner: Any = config
        for part in path:
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        assert isinstance(owner, dict) or hasattr(owner, leaf), word
        (owner if isinstance(owner, dict) else vars(owner))[leaf] = yaml.safe_load(value)
    check_effects(config, keys_in(overrides))
    find_method(config.method.name)(config).check()


@pytest.mark.parametrize(("overrides", "reason"), table(__file__, "without_effect"))
def test_option_without_effect_is_refused_by_its_key(overrides, reason, tiny):
    recipe, *given = overrides.split()
    with pytest.raises(ConfigError) as caught:
        check_quickly(recipe, tiny, *given)
    line = str(caught.value)
    assert line.startswith(f"{given[-1]} has no effect ") and "\n" not in line, line
    assert reason in line, line


@pytest.mark.parametrize(("overrides", "keys"), table(__file__, "refused"))
def test_settings_that_exclude_each_other_are_refused(overrides, keys, tiny):
    for name, text in WORDS.items():
        overrides = overrides.replace(name, text)
    with pytest.raises(ConfigError) as caught:
        check(overrides.split()[0], tiny, *overrides.split()[1:])
    line = str(caught.value)
    assert "\n" not in line
    assert all(key in line for key in keys), line


def test_refused_run_writes_nothing(tiny, tmp_path):
    config = config_of("grpo", tiny, *SMALL, "method.advantage=gae", f"runs={tmp_path}")
    with refused("conflict", "method.advantage"):
        train(config, Reporter())
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(("overrides", "part"), table(__file__, "parts"))
def test_part_of_the_score_that_is_not_reported_is_refused_before_the_run(overrides, part, tiny):
    recipe, *given = overrides.split()
    config = config_of(recipe, tiny, *SMALL, *overrides_for(recipe), *given)
    if not part:
        prepare(config).scorer.close()
        return
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    line = str(caught.value)
    assert part in line and "of its parts: answer" in line and "\n" not in line


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_accepted(recipe, tiny):
    check(recipe, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [row[0] for row in table(__file__, "allowed")])
def test_possible_combinations_are_allowed(overrides, tiny):
    check(overrides.split()[0], tiny, *overrides.split()[1:])
