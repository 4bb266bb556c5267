"""Arithmetic problems of graded difficulty, made in code: the same list in every process and Python version.

| level | problems | number of them |
|---|---|---|
| 1 | one-digit addition | 100, all |
| 2 | two-digit addition | 10,000, all |
| 3 | two- and three-digit addition and subtraction | 10,000 drawn |
| 4 | two-digit times one-digit | 1,000, all |
| 5 | two-digit times two-digit | 10,000, all |
| 6 | three two-digit operands with parentheses | 10,000 drawn |

"Two-digit" means 0 to 99 where all are listed. No answer is negative.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from postgrad.data.uid import content_uid
from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Problem

NUM_DRAWN = 10_000


@dataclass(frozen=True)
class Expression:
    """`left op right`, where an operand is a number or an expression in parentheses."""

    op: str
    left: "int | Expression"
    right: "int | Expression"

    def text(self, width: int = 0) -> str:
        """As written, with numbers zero-padded to `width` digits."""
        return f"{_operand(self.left, width)}{self.op}{_operand(self.right, width)}"

    def value(self) -> int:
        left = self.left if isinstance(self.left, int) else self.left.value()
        right = self.right if isinstance(self.right, int) else self.right.value()
        return {"+": left + right, "-": left - right, "*": left * right}[self.op]

    def key(self) -> str:
        """The same text for all orders of a sum or a product, so that 58+37 is never held out while 37+58 is trained on."""
        parts = [
            str(side) if isinstance(side, int) else f"({side.key()})"
            for side in (self.left, self.right)
        ]
        return self.op.join(parts if self.op == "-" else sorted(parts))


def _operand(side: int | Expression, width: int) -> str:
    return f"{side:0{width}d}" if isinstance(side, int) else f"({side.text(width)})"


@dataclass(frozen=True)
class Level:
    """Digits of an operand and of the answer in style `digits`, and what lists the level's expressions."""

    width: int
    answer_width: int
    expressions: Callable[[], list[Expression]]


def _pairs(op: str, left: int, right: int) -> list[Expression]:
    return [Expression(op, a, b) for a in range(left) for b in range(right)]


def _drawn(draw: Callable[[Callable[[int], int]], Expression], level: int) -> list[Expression]:
    """The first NUM_DRAWN distinct expressions without a negative part that `draw` makes from random integers."""
    # Only random() is promised to give the same numbers in every Python version.
    uniform = random.Random(level).random
    found: dict[Expression, None] = {}
    while len(found) < NUM_DRAWN:
        expression = draw(lambda n: int(uniform() * n))
        inner = [
            side.value()
            for side in (expression.left, expression.right)
            if isinstance(side, Expression)
        ]
        if min([expression.value(), *inner]) >= 0:
            found[expression] = None
    return list(found)


def _add_or_subtract(below: Callable[[int], int]) -> Expression:
    a, b = (10 + below(90) if below(2) else 100 + below(900) for _ in range(2))
    return Expression("+-"[below(2)], a, b)


def _three_operands(below: Callable[[int], int]) -> Expression:
    inner = Expression("+-"[below(2)], below(100), below(100))
    op, outer = "+-*"[below(3)], below(100)
    return Expression(op, inner, outer) if below(2) else Expression(op, outer, inner)


LEVELS = {
    1: Level(1, 2, lambda: _pairs("+", 10, 10)),
    2: Level(2, 3, lambda: _pairs("+", 100, 100)),
    3: Level(3, 4, lambda: _drawn(_add_or_subtract, 3)),
    4: Level(2, 3, lambda: _pairs("*", 100, 10)),
    5: Level(2, 4, lambda: _pairs("*", 100, 100)),
    6: Level(2, 5, lambda: _drawn(_three_operands, 6)),
}
# The number in the hash's name was chosen so that the 100 problems of level 1, too, fall about 90/5/5.
SPLIT_HASH = "split14"
SPLITS = {
    "train": range(0, 90),
    "validation": range(90, 95),
    "test": range(95, 100),
}  # shares in percent


def _digits(expression: Expression, level: int) -> Problem:
    """For a tiny character model: `37+58=` to `590`, fixed widths, the answer's digits reversed so that carries come first."""
    shape = LEVELS[level]
    answer = f"{expression.value():0{shape.answer_width}d}"[::-1]
    return _problem(
        "arithmetic/digits", f"{expression.text(shape.width)}=", answer, answer, expression, level
    )


def _boxed(expression: Expression, level: int) -> Problem:
    """For a language model: a question in words, the answer in a box."""
    text, answer = expression.text(), str(expression.value())
    question = f"What is {text}? Put the final answer in \\boxed{{}}."
    demonstration = f"{text} = {answer}, so the answer is \\boxed{{{answer}}}."
    return _problem("arithmetic/boxed", question, answer, demonstration, expression, level)


STYLES = {"digits": _digits, "boxed": _boxed}


def _problem(
    data_source: str,
    question: str,
    truth: str,
    demonstration: str,
    expression: Expression,
    level: int,
) -> Problem:
    messages = ({"role": "user", "content": question},)
    extra = {"level": level, "expression": expression.text()}
    return Problem(
        content_uid(data_source, messages, truth),
        messages,
        truth,
        data_source,
        (demonstration,),
        extra,
    )


def _hash(use: str, text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, person=use.encode()).digest(), "big"
    )


def arithmetic_problems(level: int, style: str = "digits", split: str = "train") -> list[Problem]:
    """The problems of one level and split, in a fixed mixed order, so that the first n are a fair sample.

    The split is decided by a hash of the expression alone: it is the same in both styles and in all levels.

    Raises:
        ConfigError: no such level, style or split.
    """
    if level not in LEVELS:
        raise ConfigError(
            f"arithmetic has no level {level}; give one of {', '.join(map(str, LEVELS))}"
        )
    if style not in STYLES:
        raise ConfigError(f"arithmetic has no style {style!r}; {did_you_mean(style, STYLES)}")
    if split not in SPLITS:
        raise ConfigError(f"arithmetic has no split {split!r}; {did_you_mean(split, SPLITS)}")
    chosen = [
        e for e in LEVELS[level].expressions() if _hash(SPLIT_HASH, e.key()) % 100 in SPLITS[split]
    ]
    return [STYLES[style](e, level) for e in sorted(chosen, key=lambda e: _hash("order", e.text()))]


def arithmetic_source(source: str) -> list[Problem]:
    """The problems that `arithmetic:LEVEL[:STYLE[:SPLIT]]` names; without them, style digits and split train."""
    _, *parts = source.split(":")
    if not 1 <= len(parts) <= 3 or not (parts[0].isdecimal() and len(parts[0]) < 4):
        raise ConfigError(
            f"data source {source!r} is not arithmetic:LEVEL[:STYLE[:SPLIT]]; for example arithmetic:2:digits:train"
        )
    return arithmetic_problems(int(parts[0]), *parts[1:])
