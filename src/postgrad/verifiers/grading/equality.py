"""Whether two short answers are equal, by number and by normalized LaTeX text.

`compare` returns True, False or None. None means that text and numbers cannot decide, and a
computer algebra system might. All functions take linear time, or time bounded by length limits.
"""

import re

from postgrad.verifiers.grading.closed_form import closed_value
from postgrad.verifiers.grading.numbers import brace_arguments, complex_number, number, same_number

MAX_ANSWER = 2_000  # characters; a longer answer is compared as plain text only

MAX_ROOTS = 4  # nested ones in sqrt(2+sqrt(3))

# One unit per row, with its spellings. Different units differ; a missing unit does not matter.
_UNIT_ROWS = """
percent | pct | percentage
degree | degrees | deg
radian | radians | rad
m | meter | meters | metre | metres
cm | centimeter | centimeters | centimetre | centimetres
mm | millimeter | millimeters | millimetre | millimetres
km | kilometer | kilometers | kilometre | kilometres
in | inch | inches
ft | foot | feet
yd | yard | yards
mi | mile | miles
g | gram | grams
kg | kilogram | kilograms
mg | milligram | milligrams
lb | lbs | pound | pounds
oz | ounce | ounces
ton | tons | tonne | tonnes
l | liter | liters | litre | litres
ml | milliliter | milliliters | millilitre | millilitres
gallon | gallons | gal
quart | quarts
pint | pints
cup | cups
s | sec | second | seconds
min | minute | minutes
h | hr | hrs | hour | hours
day | days
week | weeks
month | months
year | years | yr | yrs
dollar | dollars | usd
cent | cents
euro | euros
mph | miles per hour
kph | kmh | kilometers per hour
unit | units
time | times
point | points
people | person
"""
_UNITS = {
    spelling.strip(): row.split("|")[0].strip()
    for row in _UNIT_ROWS.strip().splitlines()
    for spelling in row.split("|")
}


_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_TAIL_TEXT = re.compile(
    r"(?:\\[,;: !]|\s|~){0,4}\\(?:text|textrm|mathrm|mbox)\s?\{([^{}]*)\}(?:\^\{?([0-9])\}?)?$"
)
_TAIL_WORD = re.compile(
    r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([A-Za-z]+(?: per [A-Za-z]+)?)(?:\^\{?([0-9])\}?)?\.?$"
)
# Text after an answer that is no unit: " or 41", "(and not 41)"; nor is the text after an "or".
# The 2 in "ft^2", "m2" and "s^-2" belongs to the unit.
_NO_UNIT = re.compile(r"(?<![A-Za-z0-9^])(?<!\^-)[0-9]|\A\W*(?:or|and|not|but)\b")
_OPEN_END = re.compile(r"(?:[=<>,+\-*/^_]|\b(?:or|and|not|but)\W*)\Z")
SCALES = "hundred|thousand|million|billion|trillion"
_SCALE = re.compile(rf"(?<![A-Za-z])(?:{SCALES})(?![A-Za-z])")
_SAYS = re.compile(r"^(?:=|≈|\\approx(?![A-Za-z])) *(?=[^\s=])")
_NAME = re.compile(r"\s*[A-Za-z]{1,2}(?:_\{?[0-9A-Za-z]\}?)?\s*=(?!=)\s*")
_BASE = re.compile(r"([0-9A-Fa-f]+)_(?:([0-9]{1,2})|\{([0-9]{1,2})\})")
_PYTHON_POWER = re.compile(r"(?<=[0-9A-Za-z)}\]]) ?\*\* ?(?=[-0-9A-Za-z({])")
_BARE_NAME = re.compile(
    r"(?<![A-Za-z\\])(pi(?![A-Za-z])|(?:sin|cos|tan|cot|ln|log|arcsin|arccos|arctan)(?= ?\())"
)
_BARE_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt ?\(([^()]*)\)")
_SEMICOLON = re.compile(r"(?<!\\);")
_WORD = re.compile(r"[A-Za-z][A-Za-z '-]*")

# LaTeX commands and the text that replaces them.
_COMMANDS: dict[str, str] = {
    "dfrac": "\\frac",
    "tfrac": "\\frac",
    "cfrac": "\\frac",
    "left": "",
    "right": "",
    **dict.fromkeys(
        (
            "big",
            "Big",
            "bigg",
            "Bigg",
            "bigl",
            "bigr",
            "Bigl",
            "Bigr",
            "biggl",
            "biggr",
            "Biggl",
            "Biggr",
        ),
        "",
    ),
    "degree": "",
    "neq": "\\ne",
    "leq": "\\le",
    "geq": "\\ge",
    "cdot": "\\times",
    "varnothing": "\\emptyset",
    "quad": " ",
    "qquad": " ",
}
_COMMAND = re.compile(
    r"\\(" + "|".join(sorted(_COMMANDS, key=len, reverse=True)) + r")(?![A-Za-z])"
)
_SIGNS = (
    ("\n", " "),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("°", ""),
    ("bmatrix", "pmatrix"),
    ("\\{", "\\lbrace "),
    ("\\}", "\\rbrace "),
    ("−", "-"),
    ("π", "\\pi "),
    ("√", "\\sqrt"),
    ("∞", "\\infty "),
)


def strip_wrapping(text: str) -> str:
    """Remove what surrounds an answer: $ $, \\( \\), \\[ \\], ** **, a leading =, a final stop."""
    text = text.strip()
    for _ in range(4):
        before = text
        if len(text) > 1 and text[-1] in ".,;" and text[-2] not in ".\\":
            text = text[:-1].rstrip()
        text = _SAYS.sub("", text)
        for left, right in (
            ("$$", "$$"),
            ("$", "$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
            ("**", "**"),
            ("`", "`"),
        ):
            if (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
                and (left != "$" or "$" not in text[1:-1])  # "$1$, $2$" are two
            ):
                text = text[len(left) : -len(right)].strip()
        if text == before:
            break
    return text


def as_latex(text: str) -> str:
    """Return x**2, pi, sin(x) and sqrt(x) as LaTeX, and (1;2) as (1,2) without a comma."""
    num_roots = 1
    for _ in range(MAX_ROOTS):  # the innermost first
        if not num_roots:
            break
        text, num_roots = _BARE_ROOT.subn(r"\\sqrt{\1}", text)
    text = _BARE_NAME.sub(r"\\\1", _PYTHON_POWER.sub("^", text))
    return text if "," in text else _SEMICOLON.sub(",", text)


def normalize(text: str) -> str:
    """Return LaTeX with one spelling for commands, spacing, text wrappers and the case of words."""
    for old, new in _SIGNS:
        text = text.replace(old, new)
    text = _COMMAND.sub(lambda m: _COMMANDS[m.group(1)], text)
    if "matrix" not in text and "cases" not in text:  # there \\\\ separates rows
        text = re.sub(r"\\\\(?=[a-z])", r"\\", text)
    text = re.sub(r"\\[,;: ]|~", " ", text.replace("\\!", ""))
    text = _TEXT.sub(lambda m: f" {m.group(1)} ", text)
    text = re.sub(r"\\?[$%]", " ", text)
    text = re.sub(r"(?<![ ,])[ ,]*\b(?:and|or)\b *", ",", text)
    text = re.sub(r"(^|[^0-9])\.([0-9])", r"\g<1>0.\2", text)
    text = strip_wrapping(text)
    if _WORD.fullmatch(text) and len(text) > 1:
        return " ".join(text.lower().split())
    # A space between digits means something: 7 3/4 is not 73/4.
    text = re.sub(r"(?<![0-9]) +| +(?![0-9])", "", brace_arguments(" ".join(text.split())))
    if based := _BASE.fullmatch(text):
        return f"{based.group(1)}_{based.group(2) or based.group(3)}"
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)|\{[^{}]*\}", text) else text


def split_unit(text: str) -> tuple[str, str]:
    """Return an answer and its unit, or "" without one.

    Reads 10 cm, 5\\text{ apples}, 12 square feet and 3\\text{ m}^2.
    """
    text = strip_wrapping(text)
    if found := _TAIL_TEXT.search(text):
        rest = text[: found.start()].strip()
        word = found.group(1).replace("~", " ").strip()
        if rest and word and not _NO_UNIT.search(word) and not _OPEN_END.search(rest):
            return rest, _unit_name(word, "", found.group(2))
    if found := _TAIL_WORD.search(text):
        before = text[: found.start()]
        rest = before.rstrip()
        word = found.group(2)
        # A single letter is a unit only after a space: 5m is a product, 5 m a length.
        is_word_or_separate = len(word) > 1 or before != rest
        if rest and word.lower() in _UNITS and number(rest) is not None and is_word_or_separate:
            return rest, _unit_name(word, found.group(1) or "", found.group(3))
    return text, ""


def split_list(text: str) -> list[str]:
    """Return the parts between the commas that are in no brackets."""
    items = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # (a+b)(c+d) without its outer brackets
            return [text]
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _unit_name(word: str, shape: str, power: str | None) -> str:
    words = word.lower().removesuffix(".").split()
    if len(words) == 2 and words[0] in ("square", "sq", "sq.", "cubic", "cu", "cu."):
        shape = words.pop(0)
    name = _UNITS.get(" ".join(words), " ".join(words))
    if not power and shape.startswith("sq"):
        power = "2"
    if not power and shape.startswith("cu"):
        power = "3"
    return f"{name}^{power}" if power else name


def _without_name(given: str, truth: str) -> tuple[str, str]:
    """Drop "x =" if only one of the two has it: x=5 is 5, but x=5 is not y=5."""
    if "=" in given and "=" not in truth:
        return drop_name(given), truth
    if "=" in truth and "=" not in given:
        return given, drop_name(truth)
    return given, truth


def drop_name(text: str) -> str:
    """Return the text without a leading "x =" or "x_1 ="."""
    return _NAME.sub("", text, count=1) if _NAME.match(text) else text


def compare(given: str, truth: str) -> bool | None:
    """Return whether two answers are equal, or None if numbers and normalized text cannot decide.

    An empty or overlong answer is equal to no other text. Words (yes, even, ...) are decided here:
    algebra would read them as products of letters.
    """
    given, truth = strip_wrapping(given), strip_wrapping(truth)
    if not given or not truth or len(given) > MAX_ANSWER or len(truth) > MAX_ANSWER:
        return given == truth and given != ""
    if given == truth or same_number(given, truth):
        return True
    given, truth = as_latex(given), as_latex(truth)
    # Before units are split off: of 10:30\text{ a.m.} and 10:30 a.m. only one ends in a unit.
    if normalize(given) == normalize(truth) != "":
        return True
    if bool(_SCALE.search(given)) != bool(_SCALE.search(truth)):  # 5\text{ million} is not 5
        return False
    given, given_unit = split_unit(given)
    truth, truth_unit = split_unit(truth)
    if given_unit and truth_unit and given_unit != truth_unit:
        return False
    given, truth = _without_name(given, truth)
    plain_given, plain_truth = normalize(given), normalize(truth)
    if not plain_given or not plain_truth:
        return False
    if plain_given == plain_truth:
        return True
    if same_number(given, truth) or same_number(plain_given, plain_truth):
        return True
    complex_given, complex_truth = complex_number(plain_given), complex_number(plain_truth)
    if complex_given is not None and complex_truth is not None:
        return complex_given == complex_truth
    if _surely_different(plain_given, plain_truth):
        return False
    has_percent = "%" in given or "%" in truth
    if not has_percent and _has_other_value(plain_given, plain_truth):
        return False
    return None


def _surely_different(given: str, truth: str) -> bool:
    """Return whether the kinds of two answers show that they differ.

    Kinds: two words, a word or a letter and a number, numerals with a base, two numbers that differ
    by more than rounding.
    """
    words = [bool(_WORD.fullmatch(text)) and len(text) > 1 for text in (given, truth)]
    if all(words):
        return len(given) > 2 or len(truth) > 2 or "no" in (given, truth)
    one, other = number(given), number(truth)
    if one is not None and other is not None:
        rounded = "." in given + truth or "e" in (given + truth).lower()
        return not rounded or abs(one - other) > max(abs(one), abs(other)) / 100_000
    based = [bool(_BASE.fullmatch(text)) for text in (given, truth)]
    if one is not None or other is not None:
        rest = truth if one is not None else given
        is_letter = len(rest) == 1 and rest.isalpha() and rest not in "eiπ"
        is_word = rest in ("yes", "no", "true", "false", "even", "odd")
        return any(based) or is_letter or is_word
    return all(based)


def _has_other_value(given: str, truth: str) -> bool:
    """Return whether two closed forms have different values; decimals may be rounded."""
    given_value = closed_value(given)
    if given_value is None:
        return False
    true_value = closed_value(truth)
    if true_value is None:
        return False
    tolerance = 1e-5 if "." in given + truth else 1e-9
    return abs(given_value - true_value) > tolerance * max(1.0, abs(true_value))
