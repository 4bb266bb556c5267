"""Every `postgrad train` line of the documentation is one that the package takes: its keys, its values and how they go together."""

import re
import shlex
from pathlib import Path

import pytest

from postgrad.config.compose import compose, recipe_names
from postgrad.methods import find_method

ROOT = Path(__file__).parents[2]
NEEDED = {"model.path": "tiny", "data.train": "arithmetic:1"}


def examples() -> list[str]:
    """Recipe and words of each line; not those that stand for any recipe, or name a module that the reader writes."""
    found: list[str] = []
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        text = page.read_text().replace("\\\n", " ")
        lines = [
            re.split(r" #|; | && ", line)[0]
            for line in re.findall(r"postgrad train ([^\n`]*)", text)
        ]
        found += [
            line
            for line in lines
            if line.split(" ")[0] in recipe_names() and "method=careful:" not in line
        ]
    return list(dict.fromkeys(found))


def test_examples_are_found():
    assert len(examples()) > 20


@pytest.mark.parametrize("line", examples())
def test_an_example_of_the_docs_is_allowed(line):
    recipe, *overrides = [
        word for word in shlex.split(line) if word not in ("...", "…") and not word.startswith("-")
    ]
    given = {word.partition("=")[0] for word in overrides}
    overrides += [f"{key}={value}" for key, value in NEEDED.items() if key not in given]
    config = compose(recipe, overrides, lambda name: find_method(name).Settings)
    find_method(config.method.name)(config).check()
