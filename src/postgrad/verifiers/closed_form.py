"""The value of a closed form (2\\sqrt{3}, \\frac{\\pi}{6}, (1+\\sqrt5)/2) as a float: enough to tell two of them apart, at sight.

Most wrong answers are other numbers, and an algebra system needs a thousand times longer to say so. Whatever is not plainly a
number here (a letter, a list, a mixed number, an ambiguous product) has no value, and is left to algebra.
"""

import math
import re

MAX_CLOSED = 120  # characters
MAX_NESTED = 12
_TOKEN = re.compile(
    r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\frac|\\sqrt|\\pi(?![A-Za-z])|\\times|[-+*/^(){}\[\]])"
)


class _NoValue(Exception):
    pass


def closed_value(text: str) -> float | None:
    """The value, or None when the text is anything but a closed form."""
    if len(text) > MAX_CLOSED:
        return None
    tokens, at = [], 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if not found:
            return None
        tokens.append(found.group(1))
        at = found.end()
    try:
        reader = _Reader(tokens)
        value = reader.sum(0)
        return value if not reader.left and math.isfinite(value) else None
    except (_NoValue, ArithmeticError, ValueError):
        return None


class _Reader:
    """Reads a list of tokens from the left; every method takes what belongs to it and returns its value."""

    def __init__(self, tokens: list[str]) -> None:
        self.left = tokens[::-1]

    @property
    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self, wanted: str = "") -> str:
        if not self.left or (wanted and self.next != wanted):
            raise _NoValue
        return self.left.pop()

    def sum(self, depth: int) -> float:
        if depth > MAX_NESTED:
            raise _NoValue
        sign = -1.0 if self.next == "-" else 1.0
        if self.next in ("+", "-"):
            self.take()
        value = sign * self.product(depth)
        while self.next in ("+", "-"):
            value += self.product(depth) if self.take() == "+" else -self.product(depth)
        return value

    def product(self, depth: int) -> float:
        value, divided, last = self.power(depth), False, self.last
        while self.next and self.next not in "+-)}]":
            if self.next in ("*", "\\times"):
                self.take()
                value *= self.power(depth)
            elif self.next == "/":
                self.take()
                value /= self.power(depth)
                divided = True
            elif (
                divided
                or self.next[0] in "0123456789."
                or (last == "number" and self.next == "\\frac")
            ):
                raise _NoValue  # 1/2\pi, 2 3 and 7\frac34 can be read in two ways
            else:
                value *= self.power(depth)
            last = self.last
        return value

    def power(self, depth: int) -> float:
        value = self.one(depth)
        if self.next != "^":
            return value
        self.take()
        if self.next != "{" and not (self.next.isdigit() and len(self.next) == 1):
            raise _NoValue
        exponent = self.braced(depth) if self.next == "{" else float(self.take())
        self.last = "power"
        if abs(exponent) > 1000 or self.next == "^" or (value < 0 and exponent != int(exponent)):
            raise _NoValue
        return value**exponent

    def one(self, depth: int) -> float:
        token = self.take()
        self.last = "number" if token[0] in "0123456789." else token
        if self.last == "number":
            return float(token)
        if token == "\\pi":
            return math.pi
        if token in "({":
            value = self.sum(depth + 1)
            self.take({"(": ")", "{": "}"}[token])
        elif token == "\\frac":
            value = self.braced(depth) / self.braced(depth)
        elif token == "\\sqrt":
            value = self.root(depth)
        else:
            raise _NoValue
        self.last = token
        return value

    def root(self, depth: int) -> float:
        degree = 2.0
        if self.next == "[":
            self.take()
            degree = float(self.take())
            self.take("]")
        value = self.braced(depth)
        if degree == 3 and value < 0:
            return -((-value) ** (1 / 3))
        if value < 0:
            raise _NoValue
        return value ** (1 / degree)

    def braced(self, depth: int) -> float:
        self.take("{")
        value = self.sum(depth + 1)
        self.take("}")
        return value
