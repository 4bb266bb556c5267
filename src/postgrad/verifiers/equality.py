"""Are two short answers the same? By numbers and by normalized LaTeX text; pure, and linear or capped in time.

`compare` answers True, False or None: None means that text and numbers cannot tell, and an algebra system might.
"""

import re
from fractions import Fraction

from postgrad.verifiers.closed_form import closed_value

MAX_ANSWER = 2_000  # characters; a longer answer is compared as it stands, so that no pattern below sees a hostile length
MAX_NUMBER = 400  # characters; longer numerals stay text

# Each row is one unit: its spellings. Two answers with different units are different, an answer without one may leave it out.
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

_THOUSANDS = re.compile(r"[0-9]{1,3}(?:[, ][0-9]{3})+(?=\.|$)")
_PLAIN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SCIENTIFIC = re.compile(
    r"([+-]?[0-9.]+)\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([0-9]))"
)
_MIXED = re.compile(r"([+-]?)([0-9]+) ?(?: |\+)([0-9]+)/([0-9]+)")
_MIXED_LATEX = re.compile(r"([+-]?)([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}")
_FRAC = re.compile(r"([+-]?)\\frac\{([^{}]+)\}\{([^{}]+)\}")

_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_TAIL_TEXT = re.compile(
    r"(?:\\[,;: !]|\s|~){0,4}\\(?:text|textrm|mathrm|mbox)\s?\{([^{}]*)\}(?:\^\{?([0-9])\}?)?$"
)
_TAIL_WORD = re.compile(
    r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([A-Za-z]+(?: per [A-Za-z]+)?)(?:\^\{?([0-9])\}?)?\.?$"
)
_SAYS = re.compile(r"^(?:=|≈|\\approx(?![A-Za-z])) *(?=[^\s=])")
_NAME = re.compile(r"\s*[A-Za-z]{1,2}(?:_\{?[0-9A-Za-z]\}?)?\s*=(?!=)\s*")
_BASE = re.compile(r"([0-9A-Fa-f]+)_(?:([0-9]{1,2})|\{([0-9]{1,2})\})")
_REPEATING = re.compile(
    r"([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s?(?:\{([0-9]{1,30})\}|([0-9]))"
)
_PYTHON_POWER = re.compile(r"(?<=[0-9A-Za-z)}\]]) ?\*\* ?(?=[-0-9A-Za-z({])")
_BARE_NAME = re.compile(
    r"(?<![A-Za-z\\])(pi(?![A-Za-z])|(?:sin|cos|tan|cot|ln|log|arcsin|arccos|arctan)(?= ?\())"
)
_SEMICOLON = re.compile(r"(?<!\\);")
_WORD = re.compile(r"[A-Za-z][A-Za-z '-]*")

# LaTeX commands with another name for the same thing.
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


def number(text: str) -> Fraction | None:
    """The number that the whole text is, exactly, or None. A currency or per-cent sign and a final full stop are left out.

    Reads 1234, 1,234 and 1 000, decimals, 0.1\\overline{6}, 1e3, 2\\times10^3, 3/4, \\frac{3}{4}, \\frac34 and 7 3/4. "1,23" is two
    numbers, so None.
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
    text = _brace_arguments(text)
    for pattern in (_MIXED, _MIXED_LATEX):
        if found := pattern.fullmatch(text):
            sign, whole, above, below = found.groups()
            if int(below) == 0:
                return None
            return (Fraction(int(whole)) + Fraction(int(above), int(below))) * (
                -1 if sign == "-" else 1
            )
    if found := _FRAC.fullmatch(text):
        sign, above, below = found.groups()
        return _ratio(above, below, -1 if sign == "-" else 1)
    if found := _REPEATING.fullmatch(text):
        sign, whole, once, *again = found.groups("")
        period = "".join(again)
        value = Fraction(f"{whole or 0}.{once or 0}") + Fraction(
            int(period), (10 ** len(period) - 1) * 10 ** len(once)
        )
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
    """Both are numbers and equal. Where one of them has a per-cent sign, 50% is equal to 50 and to 0.5."""
    a, b = number(given), number(truth)
    if a is None or b is None:
        return False
    if a == b:
        return True
    given_percent, truth_percent = "%" in given, "%" in truth
    return given_percent != truth_percent and (a / 100 == b if given_percent else a == b / 100)


def _brace_arguments(text: str) -> str:
    """Give bare arguments their braces: \\frac12, \\frac1{72}, \\frac{1}2, \\sqrt3."""
    if "\\" not in text:
        return text
    text = re.sub(r"\\frac ?([0-9A-Za-z]) ?([0-9A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?([0-9A-Za-z]) ?\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}", text)
    return re.sub(r"\\(sqrt|mathbb) ?([0-9A-Za-z])", r"\\\1{\2}", text)


def strip_wrapping(text: str) -> str:
    """Take away what stands around an answer without being part of it: $ $, \\( \\), \\[ \\], ** **, = before, a stop or comma after."""
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
            ):
                text = text[len(left) : -len(right)].strip()
        if text == before:
            break
    return text


def as_latex(text: str) -> str:
    """What is written as in a program, x**2, pi and sin(x), as in LaTeX; and (1;2), where no comma is a decimal point, as (1,2)."""
    text = _BARE_NAME.sub(r"\\\1", _PYTHON_POWER.sub("^", text))
    return text if "," in text else _SEMICOLON.sub(",", text)


def normalize(text: str) -> str:
    """One spelling for LaTeX that means the same at sight: names of commands, spacing, text wrappers, case of words."""
    for old, new in _SIGNS:
        text = text.replace(old, new)
    text = _COMMAND.sub(lambda m: _COMMANDS[m.group(1)], text)
    text = (
        re.sub(r"\\\\(?=[a-z])", r"\\", text)
        if "matrix" not in text and "cases" not in text
        else text
    )
    text = re.sub(r"\\[,;: ]|~", " ", text.replace("\\!", ""))
    text = _TEXT.sub(lambda m: f" {m.group(1)} ", text)
    text = re.sub(r"\\?[$%]", " ", text)
    text = re.sub(r"(?<![ ,])[ ,]*\b(?:and|or)\b *", ",", text)
    text = re.sub(r"(^|[^0-9])\.([0-9])", r"\g<1>0.\2", text)
    text = strip_wrapping(text)
    if _WORD.fullmatch(text) and len(text) > 1:
        return " ".join(text.lower().split())
    # A space between digits means something: 7 3/4 is not 73/4.
    text = re.sub(r"(?<![0-9]) +| +(?![0-9])", "", _brace_arguments(" ".join(text.split())))
    if based := _BASE.fullmatch(text):
        return f"{based.group(1)}_{based.group(2) or based.group(3)}"
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)|\{[^{}]*\}", text) else text


def split_unit(text: str) -> tuple[str, str]:
    """An answer and its unit ("" when there is none): 10 cm, 5\\text{ apples}, 12 square feet, 3\\text{ m}^2."""
    text = strip_wrapping(text)
    if found := _TAIL_TEXT.search(text):
        rest, word, power = (
            text[: found.start()].strip(),
            found.group(1).replace("~", " ").strip(),
            found.group(2),
        )
        if rest and word and rest[-1] not in "=<>,+-*/^_":
            return rest, _unit_name(word, "", power)
    if found := _TAIL_WORD.search(text):
        rest, word = text[: found.start()], found.group(2)
        # A lone letter is a unit only after a space: 5m is a product, 5 m a length.
        near = rest.rstrip()
        if (
            near
            and word.lower() in _UNITS
            and number(near) is not None
            and (len(word) > 1 or rest != near)
        ):
            return near, _unit_name(word, found.group(1) or "", found.group(3))
    return text, ""


def _unit_name(word: str, shape: str, power: str | None) -> str:
    words = word.lower().removesuffix(".").split()
    if len(words) == 2 and words[0] in ("square", "sq", "sq.", "cubic", "cu", "cu."):
        shape, words = words[0], words[1:]
    name = _UNITS.get(" ".join(words), " ".join(words))
    power = power or ("2" if shape.startswith("sq") else "3" if shape.startswith("cu") else "")
    return name + (f"^{power}" if power else "")


def _without_name(given: str, truth: str) -> tuple[str, str]:
    """Drop "x =" where only one of the two has it, so that x=5 is 5 while x=5 and y=5 stay apart."""
    if "=" in given and "=" not in truth:
        return _NAME.sub("", given, count=1) if _NAME.match(given) else given, truth
    if "=" in truth and "=" not in given:
        return given, _NAME.sub("", truth, count=1) if _NAME.match(truth) else truth
    return given, truth


def compare(given: str, truth: str) -> bool | None:
    """Whether two answers are the same: True, False, or None when numbers and normalized text cannot tell.

    An empty or overlong answer is never the same as another text; words (yes, even, ...) are decided here, since algebra
    would read them as products of letters.
    """
    given, truth = strip_wrapping(given), strip_wrapping(truth)
    if not given or not truth or len(given) > MAX_ANSWER or len(truth) > MAX_ANSWER:
        return given == truth and given != ""
    if given == truth or same_number(given, truth):
        return True
    given, truth = as_latex(given), as_latex(truth)
    if (
        normalize(given) == normalize(truth) != ""
    ):  # 10:30\text{ a.m.} and 10:30 a.m., of which only one ends in a unit
        return True
    (given, given_unit), (truth, truth_unit) = split_unit(given), split_unit(truth)
    if given_unit and truth_unit and given_unit != truth_unit:
        return False
    given, truth = _without_name(given, truth)
    plain_given, plain_truth = normalize(given), normalize(truth)
    if not plain_given or not plain_truth:
        return False
    if (
        plain_given == plain_truth
        or same_number(given, truth)
        or same_number(plain_given, plain_truth)
    ):
        return True
    percent = "%" in given or "%" in truth
    return (
        False
        if _surely_different(plain_given, plain_truth)
        or (not percent and _other_value(plain_given, plain_truth))
        else None
    )


def _surely_different(given: str, truth: str) -> bool:
    """Two words, a word or a letter and a number, numerals with a base, two numbers that rounding does not explain."""
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
        letter = len(rest) == 1 and rest.isalpha() and rest not in "eiπ"
        return any(based) or letter or rest in ("yes", "no", "true", "false", "even", "odd")
    return all(based)


def _other_value(given: str, truth: str) -> bool:
    """Two closed forms whose values are apart, by more than a decimal number's rounding where there is one."""
    one = closed_value(given)
    other = closed_value(truth) if one is not None else None
    if one is None or other is None:
        return False
    return abs(one - other) > (1e-5 if "." in given + truth else 1e-9) * max(1.0, abs(other))
