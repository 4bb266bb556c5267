"""Writes the tables of docs/cheats.md: python tests/verifiers/answer_cheats_page.py"""

import re
from collections.abc import Sequence
from pathlib import Path

from answer_cheats import CHEATS, SECTIONS, Cheat

from postgrad.problem import Problem, Score
from postgrad.verifiers.pool import VerifierPool

PAGE = Path(__file__).parents[2] / "docs" / "cheats.md"
PASSES = 0.5  # a score above this is a pass; geometry3k gives 0.1 for the form alone


def passed(pool: VerifierPool, cheats: Sequence[Cheat] = CHEATS) -> list[tuple[str, ...]]:
    """Return, for each cheat, the verifiers of its family that give the reward."""
    names: list[str] = []
    items: list[tuple[str, Problem]] = []
    for cheat in cheats:
        names += cheat.family
        items += [(cheat.response, Problem("p", (), cheat.truth))] * len(cheat.family)
    results = iter(zip(names, pool.verify(items, names), strict=True))
    found: list[tuple[str, ...]] = []
    for cheat in cheats:
        row = [next(results) for _ in cheat.family]
        failures = [result for _, result in row if not isinstance(result, Score)]
        assert not failures, (cheat.response, failures)
        found.append(tuple(name for name, result in row if result.value > PASSES))
    return found


def tables(passes: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the tables of the page by section; `passes` are the verifiers that pass each cheat."""
    names = iter(passes)
    found: dict[str, str] = {}
    for section, cheats in SECTIONS.items():
        lines = ["| cheat | response | gives the reward | why |", "|---|---|---|---|"]
        for cheat in cheats:
            given = ", ".join(f"`{name}`" for name in next(names)) or "none"
            lines.append(f"| {cheat.kind} | {_shown(cheat.response)} | {given} | {cheat.why} |")
        found[section] = "\n".join(lines)
    return found


def with_tables(page: str, found: dict[str, str]) -> str:
    """Return the page with its tables, which stand between two comments, replaced."""
    for section, table in found.items():
        pattern = rf"(<!-- table: {section} -->\n).*?(\n<!-- end of table -->)"
        page = re.sub(
            pattern, lambda match, text=table: match[1] + text + match[2], page, flags=re.DOTALL
        )
    return page


def _shown(response: str) -> str:
    """Return a response as code in a Markdown table; long ones and odd characters shortened."""
    text = ascii(response)[1:-1].replace("\\\\", "\\").replace("|", "\\|")
    if len(text) > 70:
        text = f"{text[:30]} ... {text[-20:]}"
    return f"`{text}`"


if __name__ == "__main__":
    with VerifierPool(2, 30.0) as verifiers:
        PAGE.write_text(with_tables(PAGE.read_text(), tables(passed(verifiers))))
