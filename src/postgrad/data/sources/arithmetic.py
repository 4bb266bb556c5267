"""Arithmetic problems of six difficulty levels, generated in code.

The list is the same in every process and every Python version.

| level | problems | count |
|---|---|---|
| 1 | one-digit addition | 100, all |
| 2 | two-digit addition | 10,000, all |
| 3 | two- and three-digit addition and subtraction | 10,000 sampled |
| 4 | two-digit times one-digit | 1,000, all |
| 5 | two-digit times two-digit | 10,000, all |
| 6 | three two-digit operands with parentheses | 10,000 sampled |

"Two-digit" means 0 to 99 in the levels that list all problems. No answer is negative.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from postgrad.data.sources.drawn import draw_lines
from postgrad.data.uid import content_uid
from postgrad.errors import UnknownName, WrongValue, did_you_mean
from postgrad.problem import Problem

NUM_SAMPLED = 10_000
# Called with n, returns a random integer from 0 to n - 1.
RandomBelow = Callable[[int], int]


@dataclass(frozen=True)
class Expression:
    """`left op right`. An operand is a number or an expression in parentheses."""

    op: str
    left: "int | Expression"
    right: "int | Expression"

    def text(self, width: int = 0) -> str:
        """Return the expression as text, with numbers zero-padded to `width` digits."""
        return f"{_operand(self.left, width)}{self.op}{_operand(self.right, width)}"

    def value(self) -> int:
        """Return the result."""
        left = self.left if isinstance(self.left, int) else self.left.value()
        right = self.right if isinstance(self.right, int) else self.right.value()
        return {"+": left + right, "-": left - right, "*": left * right}[self.op]

    def key(self) -> str:
        """Text that is the same for every operand order of a sum or a product.

        Splits use it, so that 58+37 is never held out while 37+58 is in the training split.
        """
        parts = [_operand_key(self.left), _operand_key(self.right)]
        if self.op != "-":
            parts.sort()
        return self.op.join(parts)


def _operand(side: int | Expression, width: int) -> str:
    return f"{side:0{width}d}" if isinstance(side, int) else f"({side.text(width)})"


def _operand_key(side: int | Expression) -> str:
    return str(side) if isinstance(side, int) else f"({side.key()})"


@dataclass(frozen=True)
class Level:
    """One difficulty level.

    Attributes:
        width: digits of an operand in style `digits`.
        answer_width: digits of the answer in style `digits`.
        expressions: returns all expressions of the level.
    """

    width: int
    answer_width: int
    expressions: Callable[[], list[Expression]]


def _all_pairs(op: str, left: int, right: int) -> list[Expression]:
    return [Expression(op, a, b) for a in range(left) for b in range(right)]


def _sampled(make: Callable[[RandomBelow], Expression], level: int) -> list[Expression]:
    """Return the first NUM_SAMPLED distinct expressions of `make` without a negative value."""
    # Python guarantees the same numbers in every version for random() only.
    uniform = random.Random(level).random
    sampled: dict[Expression, None] = {}
    while len(sampled) < NUM_SAMPLED:
        expression = make(lambda n: int(uniform() * n))
        if _has_no_negative_value(expression):
            sampled[expression] = None
    return list(sampled)


def _has_no_negative_value(expression: Expression) -> bool:
    sides = (expression.left, expression.right)
    inner_values = [side.value() for side in sides if isinstance(side, Expression)]
    return min([expression.value(), *inner_values]) >= 0


def _add_or_subtract(below: RandomBelow) -> Expression:
    left = _two_or_three_digits(below)
    right = _two_or_three_digits(below)
    return Expression("+-"[below(2)], left, right)


def _two_or_three_digits(below: RandomBelow) -> int:
    return 10 + below(90) if below(2) else 100 + below(900)


def _three_operands(below: RandomBelow) -> Expression:
    inner = Expression("+-"[below(2)], below(100), below(100))
    op = "+-*"[below(3)]
    outer = below(100)
    return Expression(op, inner, outer) if below(2) else Expression(op, outer, inner)


LEVELS = {
    1: Level(1, 2, lambda: _all_pairs("+", 10, 10)),
    2: Level(2, 3, lambda: _all_pairs("+", 100, 100)),
    3: Level(3, 4, lambda: _sampled(_add_or_subtract, 3)),
    4: Level(2, 3, lambda: _all_pairs("*", 100, 10)),
    5: Level(2, 4, lambda: _all_pairs("*", 100, 100)),
    6: Level(2, 5, lambda: _sampled(_three_operands, 6)),
}
# "14" was chosen so that the 100 problems of level 1 are also split about 90/5/5.
SPLIT_HASH = "split14"
# Percentiles of the hash that belong to each split.
SPLITS = {
    "train": range(0, 90),
    "validation": range(90, 95),
    "test": range(95, 100),
}


def _digits(expression: Expression, level: int) -> Problem:
    """Return a problem for a tiny character model: prompt `37+58=`, answer `590`.

    LayerWidths are fixed. The answer's digits are reversed, so that a carry is computed before the
    digit that needs it.
    """
    widths = LEVELS[level]
    question = f"{expression.text(widths.width)}="
    answer = f"{expression.value():0{widths.answer_width}d}"[::-1]
    return _problem("arithmetic/digits", question, answer, answer, expression, level)


def _boxed(expression: Expression, level: int) -> Problem:
    """Return a problem for a language model: a question in English, the answer in \\boxed{}."""
    text = expression.text()
    answer = str(expression.value())
    question = f"What is {text}? Put the final answer in \\boxed{{}}."
    demonstration = f"{text} = {answer}, so the answer is \\boxed{{{answer}}}."
    return _problem("arithmetic/boxed", question, answer, demonstration, expression, level)


def _picture(expression: Expression, level: int) -> Problem:
    """Return a problem for a tiny model that sees: one operand above the other in a picture.

    The answer is the expression and its result as in style `digits`: `37+58=590`.
    """
    widths = LEVELS[level]
    left, right = (_operand(side, widths.width) for side in (expression.left, expression.right))
    images = (draw_lines([left, expression.op + right]),)
    problem = _digits(expression, level)
    text = f"{problem.messages[0]['content']}{problem.ground_truth}"
    messages = ({"role": "user", "content": [{"type": "image"}]},)
    source = "arithmetic/picture"
    uid = content_uid(source, messages, text, images)
    return Problem(uid, messages, text, source, (text,), problem.extra, images=images)


STYLES = {"digits": _digits, "boxed": _boxed, "picture": _picture}


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


def _hash(purpose: str, text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big")


def in_split(key: str, split: str) -> bool:
    """Return whether a hash puts the problem with this key into a split. Raises ConfigError."""
    if split not in SPLITS:
        raise UnknownName(f"there is no split {split!r}; {did_you_mean(split, SPLITS)}", at="split")
    return _hash(SPLIT_HASH, key) % 100 in SPLITS[split]


def arithmetic_problems(level: int, style: str = "digits", split: str = "train") -> list[Problem]:
    """Return the problems of one level and split, in a fixed shuffled order.

    The first n problems are a fair sample of the split. A hash of the expression decides the
    split, so an expression is in the same split in both styles and in all levels.

    Raises:
        ConfigError: no such level, style or split.
    """
    if level not in LEVELS:
        raise UnknownName(
            f"arithmetic has no level {level}; give one of {', '.join(map(str, LEVELS))}",
            at="level",
        )
    if style not in STYLES:
        raise UnknownName(
            f"arithmetic has no style {style!r}; {did_you_mean(style, STYLES)}", at="style"
        )
    expressions = LEVELS[level].expressions()
    selected = [expression for expression in expressions if in_split(expression.key(), split)]
    selected.sort(key=lambda expression: _hash("order", expression.text()))
    make_problem = STYLES[style]
    return [make_problem(expression, level) for expression in selected]


def arithmetic_source(source: str) -> list[Problem]:
    """Return the problems of `arithmetic:LEVEL[:STYLE[:SPLIT]]`; default style digits, split train.

    Raises:
        ConfigError: the source is not of this form, or names an unknown level, style or split.
    """
    parts = source.split(":")[1:]
    if not 1 <= len(parts) <= 3 or not (parts[0].isdecimal() and len(parts[0]) < 4):
        raise WrongValue(
            f"data source {source!r} is not arithmetic:LEVEL[:STYLE[:SPLIT]]; "
            "type for example arithmetic:2:digits:train"
        )
    return arithmetic_problems(int(parts[0]), *parts[1:])
