"""Writes docs/algorithms.md from the code's tables, docstrings and recipes.

python tools/algorithms_table.py            writes the page
python tools/algorithms_table.py --check    exit code 1 if the page is out of date
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.algorithms import (
    aggregation,
    correction,
    distillation,
    kl,
    preference,
    supervised,
)
from postgrad.algorithms.advantages import ADVANTAGES, Advantage
from postgrad.algorithms.losses import LOSSES, Loss
from postgrad.config.compose import RECIPES, compose, recipe_names
from postgrad.config.schema import Config
from postgrad.methods import find_method
from postgrad.methods.support.correction import CORRECTIONS

INTRODUCTION = Path(__file__).parent / "algorithms_introduction.md"
PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
RECIPES_INTRO = (
    """`postgrad recipes NAME` prints a recipe, its settings and what to expect of a run."""
)

# Methods with a loss of their own, and its function.
OTHER_LOSSES: dict[str, Callable[..., Any]] = {
    "kto": preference.kto,
    "reward_model": preference.bradley_terry,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe: the comment of its file, and its composed configuration."""

    name: str
    source: str  # "CISPO (MiniMax-M1, 2025)"
    about: str
    expect: str
    config: Config

    @property
    def shown(self) -> bool:
        return not self.name.startswith("demo_")

    def setting(self, name: str) -> str:
        return str(vars(self.config.method).get(name, ""))


@cache
def read_recipe(name: str) -> Recipe:
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    first, *others = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    source, _, about = first.partition(": ")
    text, _, expect = " ".join([about, *others]).partition("Expect: ")
    config = compose(
        name, ["name=NAME"], lambda method: find_method(method).Settings, complete=False
    )
    return Recipe(name, source.removesuffix("."), text.strip(), expect.strip(), config)


class Section(NamedTuple):
    """A table of the page."""

    title: str
    columns: str  # separated by |
    rows: Iterable[list[str]]
    intro: str = ""


def loss_sections(recipes: list[Recipe]) -> list[Section]:
    """Advantages and losses, with the papers that the recipes name."""
    return [
        Section(
            "Advantages (`method.advantage`)",
            "name|formula|per|needs|options|source",
            advantages(recipes),
        ),
        Section(
            "Policy losses (`method.loss`)",
            "name|formula|options|aggregation|source",
            losses(recipes),
        ),
        Section(
            "Preference losses (`method.loss` of dpo)",
            "name|formula|notes",
            listed_rows(preference, preference.PREFERENCE_LOSSES),
            terms(preference),
        ),
        Section(
            "SFT losses (`method.loss` of sft)",
            "name|formula|notes",
            listed_rows(supervised, supervised.SFT_LOSSES),
            terms(supervised),
        ),
        Section("Losses of other methods", "name|formula|options", other_losses()),
    ]


def other_sections() -> list[Section]:
    """Return what is combined with a loss."""
    return [
        Section(
            "Distillation (`method.divergence`)",
            "name|formula|notes",
            listed_rows(distillation, distillation.DIVERGENCES),
            terms(distillation),
        ),
        Section(
            "Aggregation (`method.aggregation`)",
            "name|weight of a token|notes",
            listed_rows(aggregation.token_weights, aggregation.AGGREGATIONS),
            terms(aggregation.token_weights),
        ),
        Section(
            "KL to the reference (`method.kl_estimator`)",
            "name|formula|notes",
            kl_estimators(),
            terms(kl),
        ),
        Section(
            "Rollout correction (`method.correction`)",
            "name|weight",
            corrections(),
            "With rho = trainer's probability / engine's probability.",
        ),
    ]


def render() -> str:
    """Return the whole page."""
    recipes = [read_recipe(name) for name in recipe_names()]
    shown = [recipe for recipe in recipes if recipe.shown]
    rows = [recipe_row(recipe) for recipe in recipes]
    last = Section("Recipes", "name|from|what", rows, RECIPES_INTRO)
    page = INTRODUCTION.read_text()
    for section in (*loss_sections(shown), *other_sections(), last):
        page += f"\n## {section.title}\n\n"
        if section.intro:
            page += f"{section.intro}\n\n"
        page += table(section.columns.split("|"), section.rows)
    return page


# ---- sections


def advantages(recipes: list[Recipe]) -> Iterable[list[str]]:
    for name, advantage in ADVANTAGES.items():
        users = [recipe for recipe in recipes if recipe.setting("advantage") == name]
        yield [
            code(name),
            describe(advantage.function),
            advantage.level,
            ", ".join(advantage.needs) or "-",
            options(advantage),
            source_of(name, users),
        ]


def losses(recipes: list[Recipe]) -> Iterable[list[str]]:
    rl_recipes = [recipe for recipe in recipes if recipe.setting("advantage")]
    for name, loss in LOSSES.items():
        users = [recipe for recipe in rl_recipes if recipe.setting("loss") == name]
        yield [
            code(name),
            describe(loss.function),
            options(loss),
            loss.aggregation or "any",
            source_of(name, users),
        ]


def listed_rows(thing: Any, names: Iterable[str]) -> Iterable[list[str]]:
    """Yield name, formula and notes of the lines of a docstring."""
    for name in names:
        formula, notes = listed(thing, name)
        yield [code(name), code(formula), notes]


def other_losses() -> Iterable[list[str]]:
    for name, function in OTHER_LOSSES.items():
        parameters = inspect.signature(function).parameters.values()
        shown = [code(f"{p.name}={p.default}") for p in parameters if p.kind is p.KEYWORD_ONLY]
        yield [code(name), describe(function), ", ".join(shown) or "-"]


def kl_estimators() -> Iterable[list[str]]:
    for name in kl.KL_ESTIMATORS:
        if name.endswith("+"):
            formula = f"value of {name[:-1]}, gradient of k2"
            notes = "straight through; not in a reward"
        else:
            formula, notes = listed(kl, name)
        yield [code(name), code(formula), notes]


PLAIN_CORRECTIONS = {
    "auto": "token if the engine has its own weights, else none",
    "none": "1",
    "rejection": "1; only the rules of method.rejection apply",
    "bypass": "1; the engine's log-probs are the old ones, so r compares current policy and engine",
}


def corrections() -> Iterable[list[str]]:
    for name in CORRECTIONS:
        if name in correction.LEVELS:
            yield [code(name), listed(correction.importance_weights, name)[0]]
        else:
            yield [code(name), PLAIN_CORRECTIONS[name]]
    yield [code("method.rejection"), "rules by name: " + ", ".join(correction.RULES)]


def recipe_row(recipe: Recipe) -> list[str]:
    """Return name, source and the first sentence of a recipe."""
    source = recipe.source.removesuffix(", for one small machine")
    return [code(recipe.name), source, recipe.about.split(". ")[0].removesuffix(".")]


# ---- text


def describe(function: Callable[..., Any]) -> str:
    """Return a docstring's first paragraph without the shape, and the formulas that follow it."""
    first, *others = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    cell = [re.sub(r"^(Return |\((rows|tokens|pairs),\) )", "", " ".join(first.split()))]
    for paragraph in others:
        lines = paragraph.splitlines()
        is_indented = all(line.startswith("    ") for line in lines)
        if is_indented or all(" = " in line for line in lines):
            cell += [code(re.sub(r"\s{3,}", "   ", line.strip())) for line in lines]
    return "<br>".join(cell)


def listed(thing: Any, name: str) -> tuple[str, str]:
    """Return formula and notes of the line `name   formula   notes` of a docstring.

    Raises KeyError.
    """
    text = inspect.cleandoc(thing.__doc__ or "")
    match = re.search(rf"^ +{re.escape(name)} {{2,}}(.+)$", text, re.MULTILINE)
    if match is None:
        raise KeyError(f"the docstring of {thing.__name__} has no line for {name}")
    formula, *notes = re.split(r"\s{3,}", match[1].strip())
    return formula, " ".join(notes) or "-"


def terms(thing: Any) -> str:
    """Return the sentence "With x = ...:" of a docstring, which defines its symbols.

    Raises KeyError.
    """
    text = inspect.cleandoc(thing.__doc__ or "")
    match = re.search(r"\b(With\s.+?):\n\n", text, re.DOTALL)
    if match is None:
        raise KeyError(f"the docstring of {thing.__name__} does not define its symbols")
    return " ".join(match[1].split()) + "."


def options(declaration: Advantage | Loss) -> str:
    """Return the declared options with their defaults."""
    parameters = inspect.signature(declaration.function).parameters
    shown: list[str] = []
    for name in declaration.options:
        default = parameters[name].default
        shown.append(code(name if default is inspect.Parameter.empty else f"{name}={default}"))
    if isinstance(declaration, Loss):
        shown += [code(f"{name}={value:g}") for name, value in declaration.selection.items()]
    return ", ".join(shown) or "-"


def source_of(name: str, users: list[Recipe]) -> str:
    """Return the paper: from the recipe of the same name, or from the only recipe that uses it."""
    same_name = [recipe for recipe in users if recipe.name == name]
    candidates = same_name or users
    return candidates[0].source if len(candidates) == 1 else "-"


def code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


def table(columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table."""
    header = list(columns)
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([cell.replace("|", "\\|") for cell in row])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(arguments: list[str]) -> int:
    text = render()
    if arguments == ["--check"]:
        is_current = PAGE.is_file() and PAGE.read_text() == text
        advice = "out of date; run python tools/algorithms_table.py"
        print(f"{PAGE} is {'up to date' if is_current else advice}")
        return 0 if is_current else 1
    if arguments:
        print(__doc__)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
