"""docs/algorithms.md is what the code says: written again here and compared."""

import importlib.util
from pathlib import Path

import pytest

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.aggregation import AGGREGATIONS
from postgrad.algorithms.distillation import DIVERGENCES
from postgrad.algorithms.kl import KL_ESTIMATORS
from postgrad.algorithms.losses import LOSSES
from postgrad.algorithms.preference import PREFERENCE_LOSSES
from postgrad.config.compose import recipe_names

pytestmark = pytest.mark.slow  # the page composes every recipe
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location(
        "algorithms_table", ROOT / "tools" / "algorithms_table.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(generator) -> str:
    return generator.render()


def rows(page: str, section: str) -> dict[str, list[str]]:
    """The cells of a section's table by the name in the first."""
    text = page.split(f"## {section}")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [
        [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines
    ]
    return {row[0].strip("`"): row for row in cells}


def test_the_page_is_what_the_code_says(page):
    assert (ROOT / "docs" / "algorithms.md").read_text() == page, (
        "run python tools/algorithms_table.py"
    )


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("Advantages", ADVANTAGES),
        ("Policy losses", LOSSES),
        ("Preference losses", PREFERENCE_LOSSES),
        ("Losses of other methods", ["kto", "reward_model"]),
        ("Distillation", DIVERGENCES),
        ("Aggregation", AGGREGATIONS),
        ("KL to the reference", KL_ESTIMATORS),
        ("Recipes", recipe_names()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_missing_and_nothing_is_said_too_much(section, known, page):
    found = rows(page, section)
    assert list(found) == list(known)
    assert len({len(row) for row in found.values()}) == 1, "one shape of rows"
    assert all(len(row[1]) > 0 for row in found.values())


def test_every_recipe_says_where_it_comes_from_and_what_it_is(generator):
    for recipe in map(generator.read_recipe, recipe_names()):
        assert recipe.source, recipe.name
        assert not recipe.shown or (recipe.about and recipe.expect), recipe.name


def test_defaults_shown_are_the_code_s(page):
    losses = rows(page, "Policy losses")
    assert (
        losses["ppo_clip"][2] == "`clip_low=0.2`, `clip_high=0.2`, `dual_clip=3.0`"
        and losses["dro"][2] == "`beta`"
    )
    assert losses["cispo"][-1] == "CISPO (MiniMax-M1, 2025)"


def test_a_change_of_the_code_shows(generator, page, monkeypatch):
    monkeypatch.setattr(LOSSES["dro"].function, "__doc__", "DRO: something else.")
    assert "DRO: something else." in generator.render() != page
