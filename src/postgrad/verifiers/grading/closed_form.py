"""The value of a closed form such as 2\\sqrt{3}, \\frac{\\pi}{6} or (1+\\sqrt5)/2, as a float.

Most wrong answers have another numeric value, and a computer algebra system needs a thousand times
longer to find that out. Text that is not clearly one number (a letter, a list, a mixed number, an
ambiguous product) has no value here and is left to algebra.
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
    """Return the value of a closed form, or None for any other text."""
    if len(text) > MAX_CLOSED:
        return None
    tokens: list[str] = []
    end = len(text.rstrip())
    position = 0
    while position < end:
        match = _TOKEN.match(text, position)
        if not match:
            return None
        tokens.append(match.group(1))
        position = match.end()
    try:
        parser = _Parser(tokens)
        value = parser.sum(0)
    except (_NoValue, ArithmeticError, ValueError):
        return None
    return value if not parser.left and math.isfinite(value) else None


class _Parser:
    """A recursive-descent parser: every method consumes its tokens and returns their value.

    Attributes:
        left: the tokens that are not consumed yet, in reverse.
        last: the kind of the last factor: "number", "power", or its first token.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.left = tokens[::-1]
        self.last = ""

    @property
    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self, expected: str = "") -> str:
        if not self.left or (expected and self.next != expected):
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
        value = self.power(depth)
        divided = False
        last = self.last
        while self.next and self.next not in "+-)}]":
            if self.next in ("*", "\\times"):
                self.take()
                value *= self.power(depth)
            elif self.next == "/":
                self.take()
                value /= self.power(depth)
                divided = True
            elif self._is_ambiguous(divided, last):
                raise _NoValue
            else:
                value *= self.power(depth)
            last = self.last
        return value

    def _is_ambiguous(self, divided: bool, last: str) -> bool:
        """Return whether a product without a sign has two readings: 1/2\\pi, 2 3, 7\\frac34."""
        is_mixed_number = last == "number" and self.next == "\\frac"
        return divided or self.next[0] in "0123456789." or is_mixed_number

    def power(self, depth: int) -> float:
        value = self.atom(depth)
        if self.next != "^":
            return value
        self.take()
        is_digit = self.next.isdigit() and len(self.next) == 1
        if self.next != "{" and not is_digit:
            raise _NoValue
        exponent = self.braced(depth) if self.next == "{" else float(self.take())
        self.last = "power"
        is_root_of_negative = value < 0 and exponent != int(exponent)
        if abs(exponent) > 1000 or self.next == "^" or is_root_of_negative:
            raise _NoValue
        return value**exponent

    def atom(self, depth: int) -> float:
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
