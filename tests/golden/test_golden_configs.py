"""The configurations of all recipes, and of what the docs show, are those that were recorded.

After a change on purpose: python tests/golden/record.py, and read its output and the diff.
"""

from pathlib import Path

import pytest
from configs import Case, Golden, differences, report, resolve
from core_recipes import CORE_RECIPES

from postgrad.config.compose import recipe_names

GOLDEN = Golden.read()
RECIPE_CASES = [case for case in GOLDEN.changes if isinstance(case.overrides, str)]
OTHER_CASES = [case for case in GOLDEN.changes if not isinstance(case.overrides, str)]
AGAIN = "if this is meant: python tests/golden/record.py"


@pytest.fixture
def recipe_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The users' recipe files, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, text in GOLDEN.files.items():
        Path(name).write_text(text)


def check(cases: list[Case]) -> None:
    assert cases
    changed = report(
        {case: GOLDEN.settings(case) for case in cases},
        {case: resolve(case.command, case.recipe, GOLDEN.overrides(case)) for case in cases},
    )
    assert not changed, f"{changed}\n{AGAIN}"


def test_every_recipe_is_recorded():
    assert {case.recipe for case in RECIPE_CASES} == {*recipe_names()}, AGAIN


def test_core_recipes_compose_as_recorded():
    check([case for case in RECIPE_CASES if case.recipe in CORE_RECIPES])


@pytest.mark.slow
def test_other_recipes_compose_as_recorded():
    check([case for case in RECIPE_CASES if case.recipe not in CORE_RECIPES])


@pytest.mark.slow
def test_documented_settings_compose_as_recorded(recipe_files):
    check(OTHER_CASES)


def test_a_difference_is_reported_by_its_key_with_both_values():
    case = RECIPE_CASES[0]
    recorded = GOLDEN.settings(case)
    changed = recorded | {"seed": 1.0}
    del changed["runs"]
    assert differences(recorded, changed) == [
        ("runs", '"runs"', "(absent)"),
        ("seed", str(recorded["seed"]), "1.0"),
    ]
    assert differences(recorded, {"(error)": "gone"}) == [("(error)", "accepted", "gone")]
