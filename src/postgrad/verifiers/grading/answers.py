"""Finding the answer in a response, and the verifiers that need nothing else.

All take linear time in the length of the response. A response without an answer scores 0. A ground
truth that cannot be an answer is a Failure, since a score against it would mean nothing.
"""

import json
import re
from collections import deque

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.grading.equality import (
    MAX_ANSWER,
    SCALES,
    compare,
    split_unit,
    strip_wrapping,
)
from postgrad.verifiers.grading.numbers import number, same_number

MAX_REPEATS = 8  # numbers in "42, 42, 42"
MAX_BOX = 10 * MAX_ANSWER  # characters; a box must be closed within them

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Digits without a sign: 1,234.5, .5 and 1e-3.
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))?"
_HASHES = re.compile(
    r"####[\s*$\\(]{0,8}"
    rf"([-−]?\s?\\?\$?{_DIGITS}(?:/[0-9]+)?)"
)
# These patterns take linear time: nothing after an unbounded repeat can fail.
_NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z.)}}\]])[-−])?\\?\$?{_DIGITS}(?:/[0-9]+)?%?")
STATED = re.compile(
    r"\b(?i:answer|correct option|correct choice)(?:\s{1,3}(?i:option|choice))?\*{0,2}"
    r"(?:\s{1,3}(?i:is|would be)\b|\s{0,3}[:=])"
    r"|\b(?i:final answer)\*{0,2}[ \t]{0,3}\n"  # as a heading
)


# Before a number: "41 or", "41,", "41 and": the number is one of several.
_ALTERNATIVE = re.compile(
    r"(?:\bor\b|[0-9][%.]?(?:\s|\\text\{|\})*(?:[,;|&]|\band\b|\\\\))(?:\s|[\\$({\[}])*\Z"
)
# After "####" and a line break: "4. Johnny needs" is an item of a list.
_LIST_ITEM = re.compile(r"[.)][ \t]{1,3}\S")
# A number beside a variable is no answer: "1500 - C", "x + 20", "3x"; "5 m" and "60 km/h" are.
_VARIABLE = re.compile(
    r"[0-9.](?:[A-Za-z]|\s{0,3}[-−+*/^]\s{0,3}[A-Za-z])(?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z]\s{0,3}[-−+*/^]\s{0,3}[0-9.]"
)
_ONE_MORE_NUMBER = re.compile(
    r"(?:\s|\\text\{){0,4}(?:,\s|;|\||&|/\s|\bor\b|\band\b)"
    r"(?:\s|\\text\{|\}){0,4}[-$\\]{0,3}[0-9]"
)
# After a number: "12 apples", "12, which is ...", "12 (that is ..."; not "12 or", "12 million".
_WORDS_AFTER = re.compile(
    r"(?:\s|,\s(?=[A-Za-z]{2})|\s\((?=[A-Za-z]{2}))"
    rf"(?!(?:and|or|squared|cubed|{SCALES})\b|(?:to|times|plus|minus|over)\s[0-9])[A-Za-z]"
)
# After a formula between dollar signs: "or $2$", ", $2$".
_ONE_MORE_FORMULA = re.compile(r"\s{0,3}[,;]?\s{0,3}(?:or\b|and\b)?\s{0,3}\$")
HENCE = (
    "therefore|thus|hence|then|simply|just|clearly|approximately|about|roughly|around|exactly|"
    "equal to|given by"
)
_HENCE_FIRST = re.compile(rf"(?i:{HENCE})\b[\s:]*")


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def boxed_answer(text: str) -> str | None:
    """Return the content of the last \\boxed or \\fbox, or None without one that is closed.

    `\\boxed 5` without braces has the text before the next $ on the line, else the next word.
    """
    last = last_match(_BOX, text)
    if last is None:
        return None
    rest = text[last.end() : last.end() + MAX_BOX].lstrip()
    if not rest.startswith("{"):
        line = rest.split("\n", 1)[0]
        if "$" in line:
            return line.split("$", 1)[0].strip() or None
        words = line.split(maxsplit=1)
        return words[0] if words else None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return rest[1 : brace.start()].strip() if brace.group() == "}" else None
    return None


def last_number(text: str) -> str | None:
    """Return the last number as written (commas, sign, $ and %), or None.

    The minus of a subtraction is not a sign.
    """
    last = last_match(_NUMBER, text)
    if last is None:
        return None
    text = last.group().rstrip(",")
    # Digits with commas that do not separate thousands are a list: its last item counts.
    return text if number(text) is not None else text.rsplit(",", 1)[-1]


def single_number(text: str) -> str | None:
    """Return the last number, or None if it is one of several alternatives: 41 or 42; 41, 42.

    A number that is repeated, "42 and 42", is no alternative.
    """
    numbers = deque(_NUMBER.finditer(text), maxlen=MAX_REPEATS)
    if not numbers:
        return None
    current = numbers.pop()
    found = current.group().rstrip(",")
    if number(found) is None:
        return None
    while _ALTERNATIVE.search(text, max(0, current.start() - 20), current.start()):
        if not numbers:
            return None
        current = numbers.pop()
        if not same_number(current.group().rstrip(","), found):
            return None
    return found


def hash_answer(text: str) -> str | None:
    """Return the number directly after the last `####`, or None.

    The number of an item in a list on the next line is none.
    """
    start = text.rfind("####")
    match = _HASHES.match(text, start) if start >= 0 else None
    if match is None:
        return None
    if "\n" in text[start : match.start(1)] and _LIST_ITEM.match(text, match.end()):
        return None
    return match.group(1).rstrip(",").replace(" ", "")


def stated_answer(text: str) -> str | None:
    """Return the text after the last "answer is" or "answer:", or None.

    It ends with the line or the sentence.
    """
    last = last_match(STATED, text)
    if last is None:
        return None
    line = text[last.end() : last.end() + MAX_ANSWER].lstrip(":*= \t\r\n").split("\n", 1)[0]
    line = re.split(r"\.\s", line, maxsplit=1)[0].strip()
    line = _HENCE_FIRST.sub("", line)
    if line.count("**") % 2:  # the bold began before the answer
        line = line.replace("**", "", 1)
    for delimiter in ("$$", "$"):
        if line.startswith(delimiter) and line.count(delimiter) > 1:
            _, formula, rest = line.split(delimiter, 2)
            if _ONE_MORE_FORMULA.match(rest):
                return strip_wrapping(line.replace("$", " "))
            return formula.strip() or None
    number_then_words = _NUMBER.match(line)
    if number_then_words and _WORDS_AFTER.match(line, number_then_words.end()):
        return number_then_words.group()
    return strip_wrapping(line) or None


def after_thought(response: str) -> str:
    """Return the text after the first `</think>`; without one, the whole response."""
    before, closing, after = response.partition("</think>")
    return after if closing else before


def has_box(text: str) -> bool:
    """Return whether the text opens a \\boxed or \\fbox."""
    return _BOX.search(text) is not None


def final_answer(text: str) -> str | None:
    """Return the boxed answer; without a box, the stated answer or else the last number.

    The last number counts only if it is not one of several alternatives.
    """
    if has_box(text):
        return boxed_answer(text)
    return stated_answer(text) or single_number(text)


def truth_of(problem: Problem) -> str:
    """Return the ground truth as a short answer.

    In a worked solution it follows #### or is in the last box.
    """
    truth = problem.ground_truth
    if "####" in truth:
        truth = truth.rsplit("####", 1)[1]
    return strip_wrapping(boxed_answer(truth) or truth)


def result(answer: bool, **parts: bool) -> Score:
    """Return a score of 0 or 1 with the part `answer` and these parts."""
    return Score(
        float(answer),
        {"answer": float(answer)} | {name: float(part) for name, part in parts.items()},
    )


def unusable(problem: Problem, wanted: str) -> Failure:
    """Return the Failure for a ground truth that is not `wanted`."""
    return Failure(
        "invalid",
        f"the ground truth {problem.ground_truth[:80]!r} of problem {problem.uid} is not {wanted}",
    )


def exact(response: str, problem: Problem) -> Score | Failure:
    """1 if the response is the ground truth, without surrounding white space."""
    if not problem.ground_truth.strip():
        return unusable(problem, "an answer")
    return result(response.strip() == problem.ground_truth.strip())


def numeric(response: str, problem: Problem) -> Score | Failure:
    """1 if the last number of the response equals the ground truth: 1,234.0 is 1234, $5 is 5."""
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found = last_number(response)
    return result(found is not None and same_number(found, truth), format=found is not None)


def boxed(response: str, problem: Problem) -> Score | Failure:
    """1 if the last \\boxed answer is the ground truth, as a number or as normalized LaTeX.

    Part `format`: there is such a box.
    """
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    found = boxed_answer(response)
    return result(found is not None and compare(found, truth) is True, format=found is not None)


def gsm8k(response: str, problem: Problem) -> Score | Failure:
    """1 if the number after the last `####`, else in the last box, else the last one, is right.

    Several alternatives, "41 or 42", are no answer.

    Part `format`: the answer is marked by `####` or a box.
    """
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found, marked = gsm8k_answer(response)
    return result(found is not None and same_number(found, truth), format=marked)


def gsm8k_answer(response: str) -> tuple[str | None, bool]:
    """Return the number that a response gives, and whether it is marked as the answer."""
    if (strict := hash_answer(response)) is not None:
        after = response[response.rfind("####") :].partition(strict)[2]
        return (None if _has_alternative(after, strict) else strict), True
    box = boxed_answer(response)
    if box is None:
        return single_number(response), False
    bare = split_unit(box.rpartition("=")[2])[0]
    if number(bare) is None:
        numbers = _NUMBER.findall(bare)
        bare = numbers[0] if len(numbers) == 1 and not _VARIABLE.search(bare) else None
    return bare, True


def _has_alternative(after: str, found: str) -> bool:
    """Return whether another number follows the one found: "41 or 42", but not "42 and 42"."""
    end = 0
    while more := _ONE_MORE_NUMBER.match(after, end):
        following = _NUMBER.match(after, more.end() - 1)
        if following is None or not same_number(following.group().rstrip(","), found):
            return True
        end = following.end()
    return False


def gsm8k_strict(response: str, problem: Problem) -> Score | Failure:
    """1 if the number after the last `####` equals the ground truth."""
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found = hash_answer(response)
    return result(found is not None and same_number(found, truth), format=found is not None)


def gsm8k_flexible(response: str, problem: Problem) -> Score | Failure:
    """1 if the last number of the response equals the ground truth."""
    return numeric(response, problem)


def search(response: str, problem: Problem) -> Score | Failure:
    """1 if the text in the last <answer> is an accepted answer.

    Case, punctuation, articles and spacing do not count. The ground truth is one answer, a JSON
    list of answers, or {"target": list}. Part `format`: there is a closed <answer>.
    """
    truths = [plain for truth in _accepted(problem.ground_truth) if (plain := _plain_words(truth))]
    if not truths:
        return unusable(problem, "an answer or a list of answers")
    inner, closing, _ = response.rpartition("<answer>")[2].partition("</answer>")
    closed = bool(closing) and "<answer>" in response
    return result(closed and _plain_words(inner) in truths, format=closed)


def _accepted(truth: str) -> list[str]:
    try:
        given = json.loads(truth)
    except (ValueError, RecursionError):
        return [truth]
    given = given.get("target", truth) if isinstance(given, dict) else given
    return [str(item) for item in given] if isinstance(given, list) else [str(given)]


def _plain_words(text: str) -> str:
    words = re.sub(r"[^\w\s]", "", text[:MAX_ANSWER].lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def tagged_answers(response: str) -> tuple[bool, list[str]]:
    """Return whether the response has the form `</think> <answer>...</answer>`, and its answers.

    One space or one newline separates the tags; the last <answer> counts. A response in another
    form has answers too, so that right answers in a wrong format can be counted: the text after
    `<answer>`, or what the whole response states.
    """
    before, opening, after = response.rpartition("<answer>")
    inner, closing, _ = after.partition("</answer>")
    head = before + opening
    has_tags = "</think> <answer>" in head or "</think>\n<answer>" in head
    text = inner if opening else response
    answers = [inner if opening else None, stated_answer(text)]
    if has_box(text):
        answers = [boxed_answer(text)]
    return bool(closing) and has_tags, [answer for answer in answers if answer and answer.strip()]
