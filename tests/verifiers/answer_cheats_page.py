"""Writes the table of docs/rewards.md: python tests/verifiers/answer_cheats_page.py"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from answer_cheats import CHEATS, SECTIONS, Cheat

from postgrad.problem import Problem, Score
from postgrad.verifiers.pool import VerifierPool

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
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


def table(passes: Sequence[Sequence[str]]) -> str:
    """Return the table of the page; `passes` are the verifiers that pass each cheat."""
    given = dict(zip(map(id, CHEATS), passes, strict=True))
    lines = ["| cheat | tried | an example | accepted by (of the tried) |", "|---|---:|---|---|"]
    for section, cheats in SECTIONS.items():
        for kind in dict.fromkeys(cheat.kind for cheat in cheats):
            tried = [cheat for cheat in cheats if cheat.kind == kind]
            counts = Counter(name for cheat in tried for name in given[id(cheat)])
            shown = ", ".join(f"`{name}` {count}" for name, count in counts.items()) or "none"
            example = _shown(tried[0].response)
            lines.append(f"| {section}: {kind} | {len(tried)} | {example} | {shown} |")
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """Return the page with its table, which stands between two comments, replaced."""
    pattern = r"(<!-- table: cheats -->\n).*?(<!-- end of table -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)


def _shown(response: str) -> str:
    """Return a response as code in a Markdown table; long ones and odd characters shortened."""
    text = ascii(response)[1:-1].replace("\\\\", "\\").replace("|", "\\|")
    if len(text) > 70:
        text = f"{text[:30]} ... {text[-20:]}"
    return f"`{text}`"


if __name__ == "__main__":
    with VerifierPool(2, 30.0) as verifiers:
        PAGE.write_text(with_table(PAGE.read_text(), table(passed(verifiers))))
