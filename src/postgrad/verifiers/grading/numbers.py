"""Exact numbers in answers: real ones as fractions, complex ones as two fractions."""

import re
from fractions import Fraction

MAX_NUMBER = 400  # characters; longer numerals are not parsed

_THOUSANDS = re.compile(r"[0-9]{1,3}(?:[, ][0-9]{3})+(?=\.|$)")
_PLAIN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SCIENTIFIC = re.compile(
    r"([+-]?[0-9.]+)\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([0-9]))"
)
_MIXED = re.compile(r"([+-]?)([0-9]+) ?(?: |\+)([0-9]+)/([0-9]+)")
_MIXED_LATEX = re.compile(r"([+-]?)([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}")
_FRAC = re.compile(r"([+-]?)\\frac\{([^{}]+)\}\{([^{}]+)\}")
_REPEATING = re.compile(
    r"([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s?(?:\{([0-9]{1,30})\}|([0-9]))"
)
_TERM = re.compile(r"[+-]?[^+-]+")


def number(text: str) -> Fraction | None:
    """Return the exact number that the whole text is, or None.

    A currency sign, a percent sign and a final full stop are ignored. Reads 1234, 1,234 and 1 000,
    decimals, 0.1\\overline{6}, 1e3, 2\\times10^3, 3/4, \\frac{3}{4}, \\frac34 and 7 3/4. "1,23" is
    two numbers, so None.
    """
    if len(text) > MAX_NUMBER:
        return None
    if text.isascii() and text.isdigit():
        return Fraction(int(text))
    text = (
        text.strip()
        .replace("−", "-")
        .replace("{,}", ",")
        .replace("\\,", " ")
        .replace("\\ ", " ")
        .replace("\\!", "")
    )
    text = re.sub(r"^([+-]?) ?\\?[$€£] ?|(?: ?\\?[%$€])$", r"\1", text.removesuffix(".").strip())
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()
    text = brace_arguments(text)
    for pattern in (_MIXED, _MIXED_LATEX):
        if found := pattern.fullmatch(text):
            sign, integer, above, below = found.groups()
            if int(below) == 0:
                return None
            value = Fraction(int(integer)) + Fraction(int(above), int(below))
            return -value if sign == "-" else value
    if found := _FRAC.fullmatch(text):
        sign, above, below = found.groups()
        return _ratio(above, below, -1 if sign == "-" else 1)
    if found := _REPEATING.fullmatch(text):
        sign, integer, decimals, *periods = found.groups("")
        period = "".join(periods)
        value = Fraction(f"{integer or 0}.{decimals or 0}")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
        return -value if sign == "-" else value
    if found := _SCIENTIFIC.fullmatch(text):
        return _plain(f"{found.group(1)}e{found.group(2) or found.group(3)}")
    if text.count("/") == 1:
        above, below = text.split("/")
        return _ratio(above, below, 1)
    return _plain(text)


def _ratio(above: str, below: str, sign: int) -> Fraction | None:
    top, bottom = _plain(above.strip()), _plain(below.strip())
    return None if top is None or not bottom else sign * top / bottom


def _plain(text: str) -> Fraction | None:
    sign, digits = (text[0], text[1:].strip()) if text[:1] in ("+", "-") else ("", text)
    if _THOUSANDS.match(digits):
        digits = _THOUSANDS.sub(
            lambda m: m.group().replace(",", "").replace(" ", ""), digits, count=1
        )
    return Fraction(sign + digits) if _PLAIN.fullmatch(digits) else None


def same_number(given: str, truth: str) -> bool:
    """Return whether both are numbers and equal; 50% is equal to 50 and to 0.5."""
    given_number = number(given)
    true_number = number(truth)
    if given_number is None or true_number is None:
        return False
    if given_number == true_number:
        return True
    if "%" in given and "%" not in truth:
        return given_number / 100 == true_number
    if "%" in truth and "%" not in given:
        return given_number == true_number / 100
    return False


def brace_arguments(text: str) -> str:
    """Add braces to bare arguments: \\frac12, \\frac1{72}, \\frac{1}2, \\sqrt3."""
    if "\\" not in text:
        return text
    text = re.sub(r"\\frac ?([0-9A-Za-z]) ?([0-9A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?([0-9A-Za-z]) ?\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}", text)
    return re.sub(r"\\(sqrt|mathbb) ?([0-9A-Za-z])", r"\\\1{\2}", text)


def complex_number(text: str) -> tuple[Fraction, Fraction] | None:
    """Return real and imaginary part of a+bi in either order, or None for any other text.

    Reads 2+3i, 3i+2, -i, 1-\\frac{1}{2}i. A text without i has no value here.
    """
    terms = _TERM.findall(text.replace(" ", "")) if len(text) <= MAX_NUMBER else []
    if "".join(terms) != text.replace(" ", "") or not 1 <= len(terms) <= 2:
        return None
    parts: dict[bool, Fraction] = {}
    for term in terms:
        is_imaginary = term.endswith("i")
        value = _coefficient(term.removesuffix("i")) if is_imaginary else number(term)
        if value is None or is_imaginary in parts:
            return None
        parts[is_imaginary] = value
    if True not in parts:
        return None
    return parts.get(False, Fraction(0)), parts[True]


def _coefficient(text: str) -> Fraction | None:
    """Return the factor of i; without digits it is 1 or -1."""
    return Fraction(f"{text}1") if text in ("", "+", "-") else number(text)
