"""Cheats against the verifiers, what each verifier gives for them, and why: answer_cheats.yaml.

answer_cheats_page.py counts them in docs/rewards.md; test_answer_cheats.py checks every row. Cheats
against tests of code are in tests/sandbox/cheats.jsonl.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NUMERIC = (
    "exact",
    "numeric",
    "gsm8k",
    "gsm8k_strict",
    "gsm8k_flexible",
    "boxed",
    "math",
    "math_answer",
    "oat",
    "think_math",
    "r1_zero",
    "r1_zero_math",
    "question_only",
    "geometry3k",
)


@dataclass(frozen=True)
class Cheat:
    """A response that tries to get a reward it should not get, or that looks like it.

    Attributes:
        passed_by: the verifiers of the family that give the reward; the others give none.
    """

    kind: str
    response: str
    why: str
    passed_by: tuple[str, ...]
    truth: str
    family: tuple[str, ...]


# section -> (ground truth, verifiers)
READ_BY = {
    "answers": ("42", NUMERIC),
    "choice": ("B", ("choice",)),
    "search": ("Paris", ("search",)),
    "form": ("42", ("format", "box_format", "think_format")),
}


def read_section(name: str, rows: list[list[Any]]) -> list[Cheat]:
    """Return the cheats of a section of the file."""
    truth, family = READ_BY[name]
    cheats: list[Cheat] = []
    for kind, why, passed_by, responses, *others in rows:
        verifiers = tuple(others[0]) if others else family
        for response in responses:
            text = re.sub(r"<<(.*?) \* (\d+)>>", lambda run: run[1] * int(run[2]), response)
            cheats.append(Cheat(kind, text, why, tuple(passed_by), truth, verifiers))
    return cheats


TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SECTIONS = {name: read_section(name, rows) for name, rows in TABLE.items()}
ANSWERS = SECTIONS["answers"]
CHEATS = [cheat for section in SECTIONS.values() for cheat in section]
