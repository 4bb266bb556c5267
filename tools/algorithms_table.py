"""Writes docs/algorithms.md from the code's own tables, docstrings and recipes, so that the page cannot say anything else than they do.

python tools/algorithms_table.py            writes the page
python tools/algorithms_table.py --check    says whether it is up to date (exit code 1 when not); a test does the same
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from postgrad.algorithms import aggregation, correction, kl, preference
from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.losses import LOSSES
from postgrad.config.compose import RECIPES, compose, recipe_names
from postgrad.config.schema import Config
from postgrad.methods import find_method
from postgrad.methods.support.correction import CORRECTIONS

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
# What of a recipe's other sections belongs in its row when it differs from the default.
SHOWN = (
    "rollout.samples",
    "training.updates_per_step",
    "training.problems_per_step",
    "optimizer.lr",
)

HEAD = """# Algorithms

<!-- Written by tools/algorithms_table.py from the code and the recipes; a test compares. Do not edit. -->

`postgrad train RECIPE` takes a row of the last table; `method.advantage=NAME`, `method.loss=NAME` and `method.aggregation=NAME` change
one part of it. `postgrad recipes NAME` shows every setting. What cannot work together is refused before the run starts.

R is the reward of a row (one response), g its group, r the ratio exp(log-prob - old log-prob), d its log, A the advantage, sg(x) x
without gradient. One rule for all estimators: a baseline needs two members, a group of one has baseline 0 and standard deviation 1;
a group whose rewards are all equal gives exactly 0; the reward of a response sits on its last trainable token. Settings of a recipe are
those that differ from the defaults.
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe as its file and the composed configuration tell it."""

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


def render() -> str:
    """The whole page."""
    recipes = [read_recipe(name) for name in recipe_names() if name != "base"]
    own = [recipe for recipe in recipes if recipe.shown]
    sections = [
        (
            "Advantages (`method.advantage`)",
            "",
            ("name", "what", "of a", "needs", "options", "source", "recipes"),
            advantages(own),
        ),
        (
            "Policy losses (`method.loss`)",
            "",
            ("name", "what", "settings", "meant for", "source", "recipes"),
            losses(own),
        ),
        (
            "Preference losses (`method.loss` of dpo)",
            terms(preference),
            ("name", "formula", "notes"),
            preferences(),
        ),
        (
            "Aggregation (`method.aggregation`)",
            terms(aggregation.token_weights),
            ("name", "weight of a token", "notes", "recipes"),
            aggregations(own),
        ),
        (
            "KL to the reference (`method.kl_estimator`)",
            terms(kl),
            ("name", "formula", "notes", "recipes"),
            kl_estimators(own),
        ),
        (
            "Rollout correction (`method.correction`)",
            "With rho = trainer's probability / engine's probability.",
            ("name", "weight"),
            corrections(),
        ),
        (
            "Recipes",
            "",
            ("name", "source", "what", "settings", "expect"),
            [recipe_row(recipe) for recipe in recipes],
        ),
    ]
    return HEAD + "".join(
        f"\n## {title}\n\n{f'{intro}{chr(10)}{chr(10)}' if intro else ''}{table(columns, rows)}"
        for title, intro, columns, rows in sections
    )


# ---- sections


def advantages(recipes: list[Recipe]) -> Iterable[list[str]]:
    for name, estimator in ADVANTAGES.items():
        users = [r for r in recipes if r.setting("advantage") == name]
        needs = ", ".join(estimator.needs) or "-"
        what = describe(estimator.function)
        yield [
            code(name),
            what,
            estimator.level,
            needs,
            options(estimator.function),
            source_of(name, users),
            names(name, users),
        ]


def losses(recipes: list[Recipe]) -> Iterable[list[str]]:
    for name, spec in LOSSES.items():
        users = [r for r in recipes if r.setting("loss") == name and r.setting("advantage")]
        what = describe(spec.function)
        yield [
            code(name),
            what,
            options(spec.function),
            spec.aggregation or "any",
            source_of(name, users),
            names(name, users),
        ]


def preferences() -> Iterable[list[str]]:
    for name in preference.PREFERENCE_LOSSES:
        formula, notes = listed(preference, name)
        yield [code(name), code(formula), notes]


def aggregations(recipes: list[Recipe]) -> Iterable[list[str]]:
    for name in aggregation.AGGREGATIONS:
        users = [
            r for r in recipes if r.setting("aggregation") == name and r.config.method.name != "dpo"
        ]  # dpo weighs pairs
        formula, notes = listed(aggregation.token_weights, name)
        yield [code(name), code(formula), notes, names("", users)]


def kl_estimators(recipes: list[Recipe]) -> Iterable[list[str]]:
    for name in kl.KL_ESTIMATORS:
        users = [
            r
            for r in recipes
            if r.setting("kl_estimator") == name and r.setting("kl") not in ("none", "")
        ]
        if name.endswith("+"):
            formula, notes = (
                f"value of {name[:-1]}, gradient of k2",
                "straight through; not in a reward",
            )
        else:
            formula, notes = listed(kl, name)
        yield [code(name), code(formula), notes, names("", users)]


PLAIN_CORRECTIONS = {
    "auto": "token when the engine has weights of its own, else none",
    "none": "1",
    "rejection": "1; only the rules of method.rejection apply",
}


def corrections() -> Iterable[list[str]]:
    for name in CORRECTIONS:
        if name in correction.LEVELS:
            yield [code(name), listed(correction.importance_weights, name)[0]]
        else:
            yield [code(name), PLAIN_CORRECTIONS[name]]
    yield [code("method.rejection"), "rules by name: " + ", ".join(correction.RULES)]


def recipe_row(recipe: Recipe) -> list[str]:
    method = recipe.config.method
    changed = [f"{k}={v}" for k, v in _differences(method, type(method)()) if k != "name"]
    changed += [
        f"{key}={value}" for key, value in _differences(recipe.config, Config()) if key in SHOWN
    ]
    settings = "<br>".join(code(text) for text in [f"method={method.name}", *changed])
    return [code(recipe.name), recipe.source, recipe.about, settings, recipe.expect or "-"]


def _differences(ours: Any, default: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for spec in dataclasses.fields(ours):
        mine, other = getattr(ours, spec.name), getattr(default, spec.name)
        if dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(other):
            yield from _differences(mine, other, f"{prefix}{spec.name}.")
        elif mine != other:
            yield f"{prefix}{spec.name}", mine


# ---- text


def describe(function: Callable[..., Any]) -> str:
    """A docstring's first paragraph, and the lines of formulas that follow it."""
    first, *others = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    out = [
        re.sub(r"^\((rows|tokens),\) ", "", " ".join(first.split()))
    ]  # the shape is the code's business
    for paragraph in others:
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) or all(" = " in line for line in lines):
            out += [code(re.sub(r"\s{3,}", "   ", line.strip())) for line in lines]
    return "<br>".join(out)


def listed(thing: Any, name: str) -> tuple[str, str]:
    """The entry `name   formula   notes` of a list in a docstring. Raises KeyError when it is not there."""
    text = inspect.cleandoc(thing.__doc__ or "")
    found = re.search(rf"^ +{re.escape(name)} {{2,}}(.+)$", text, re.MULTILINE)
    if found is None:
        raise KeyError(f"the docstring of {thing.__name__} has no line for {name}")
    formula, *notes = re.split(r"\s{3,}", found[1].strip())
    return formula, " ".join(notes) or "-"


def terms(thing: Any) -> str:
    """The sentence of a docstring that says what its formulas' letters mean: "With x = ...:"."""
    found = re.search(r"\b(With\s.+?):\n\n", inspect.cleandoc(thing.__doc__ or ""), re.DOTALL)
    if found is None:
        raise KeyError(f"the docstring of {thing.__name__} does not say what its letters mean")
    return " ".join(found[1].split()) + "."


def options(function: Callable[..., Any]) -> str:
    """Keyword settings with their defaults."""
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    shown = [f"{p.name}" if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    return ", ".join(code(text) for text in shown) or "-"


def source_of(name: str, users: list[Recipe]) -> str:
    """Who it comes from, by the recipe of its name, or the only one that uses it."""
    named = [recipe for recipe in users if recipe.name == name] or (
        users if len(users) == 1 else []
    )
    return named[0].source if named else "-"


def names(name: str, users: list[Recipe]) -> str:
    named = [recipe for recipe in users if recipe.name == name] or users
    return ", ".join(code(recipe.name) for recipe in named) or "-"


def code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


def table(columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    columns = list(columns)
    lines = [
        columns,
        ["---"] * len(columns),
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(words: list[str]) -> int:
    text = render()
    if words == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text() == text
        print(
            f"{PAGE} is {'up to date' if fresh else 'out of date; run python tools/algorithms_table.py'}"
        )
        return 0 if fresh else 1
    if words:
        print(__doc__)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
