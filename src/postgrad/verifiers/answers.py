"""Finding the answer in a response, and the verifiers that need nothing but that: all linear in the length of the response.

Every verifier here is `(response, problem) -> Score | Failure`. A response without an answer scores 0; a ground truth that
cannot be an answer is a Failure, since a score against it would mean nothing.
"""

import json
import re
from collections import deque
from dataclasses import dataclass

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.equality import (
    MAX_ANSWER,
    compare,
    number,
    same_number,
    split_unit,
    strip_wrapping,
)

MAX_BOX = 10 * MAX_ANSWER  # characters; a box that does not close within them is not closed

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHES = re.compile(
    r"####[\s*$\\(]{0,8}([-−]?\s?\\?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?)"
)
# Nothing may fail after an unbounded repeat in these patterns: that is what keeps them linear.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)}\]])[-−])?\\?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?%?"
)
_STATED = re.compile(
    r"\b(?i:answer|correct option|correct choice)(?:\s{1,3}(?i:option|choice))?(?:\s{1,3}(?i:is|would be)\b|\s{0,3}[:=])"
    r"|\b(?i:final answer)\*{0,2}[ \t]{0,3}\n"  # as a heading
)


# After a number: "12 apples", "12, which is ...", "12 (that is ...".
_WORDS_AFTER = re.compile(r"(?:\s|,\s(?=[A-Za-z]{2})|\s\((?=[A-Za-z]{2}))(?!and\b|or\b)[A-Za-z]")
_HENCE = "therefore|thus|hence|then|simply|just|clearly|approximately|about|roughly|around|exactly|equal to|given by"
_HENCE_FIRST = re.compile(rf"(?i:{_HENCE})\b[\s:]*")
# After an option: "B is correct", "Option (B) is the right answer".
_IS_RIGHT = r"[)\]}*$.]{0,4}\s{1,3}(?:is|would be|seems)\s{1,3}(?:the\s{1,3})?(?:most\s{1,3})?(?i:correct|right|true|best|answer)\b"


@dataclass(frozen=True)
class _Labels:
    """How the options of a question are named, and the patterns that find a name."""

    names: str
    stated: re.Pattern[str]  # after "answer is"
    lone: re.Pattern[str]  # as the whole response
    option: re.Pattern[str]  # in brackets
    right: re.Pattern[str]  # before "is correct"
    others: re.Pattern[str]  # one more option in a list, after the first

    @staticmethod
    def of(names: str, plain: str) -> "_Labels":
        lead = rf"(?:\s|[*$:({{\[\"'`“‘]|\\\(|(?i:option|choice|letter|{_HENCE})\b|\\(?:text|textbf|mathrm|mathbf|boxed)\b){{0,8}}"
        lone = rf"(?:(?i:option|choice)\s)?[\s*(\[$]{{0,6}}([{names}])"
        lone += r"(?:\*{0,2}[.):]\*{0,2}(?=\s)([^\n]{0,200})|[\s*)\].:$]{0,6})"
        stated, option = (
            re.compile(f"{lead}({plain})", re.MULTILINE),
            re.compile(rf"\(([{names}])\)"),
        )
        others = re.compile(
            rf"\s{{0,2}}(?:,|/|&|or\b|and\b| )\s{{0,2}}(?:or\s|and\s)?[(*]{{0,3}}[{names}][)*]{{0,3}}(?=[\s.,/&]|$)"
        )
        right = re.compile(rf"(?<![\w'’])([{names}]){_IS_RIGHT}")
        return _Labels(names, stated, re.compile(lone), option, right, others)


# A, I and numbers also stand in prose, so they count only at the end of a line, before punctuation or, A, before a reason.
_LETTERS = _Labels.of(
    "ABCDEFGHIJ",
    r"[B-HJ](?![A-Za-z0-9])(?!['’][A-Za-z])|[AI](?=[)\].,;:*$}\"'`”’\\]|\s{0,3}$)(?!['’][A-Za-z])"
    r"|A(?=\s(?:because|since|as|due|and|or)\s)",
)
_DIGITS = _Labels.of("123456789", r"[1-9](?=[)\].,;:*$}](?![0-9])|\s{0,3}$)")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def boxed_answer(text: str) -> str | None:
    """The content of the last \\boxed or \\fbox, braces balanced; None without one, or when the last one is not closed.

    `\\boxed 5` without braces takes what stands before the next $ on the line, else the next word.
    """
    last = _last(_BOX, text)
    if last is None:
        return None
    rest = text[last.end() : last.end() + MAX_BOX].lstrip()
    if not rest.startswith("{"):
        line = rest.split("\n", 1)[0]
        words = (
            line.split("$", 1)[0]
            if "$" in line
            else line.split(maxsplit=1)[0]
            if line.strip()
            else ""
        )
        return words.strip() or None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return rest[1 : brace.start()].strip() if brace.group() == "}" else None
    return None


def last_number(text: str) -> str | None:
    """The last number as written (commas, sign, $ and %), or None. The minus of a subtraction is not a sign."""
    last = _last(_NUMBER, text)
    if last is None:
        return None
    found = last.group().rstrip(",")
    # Digits with commas that are no thousands are a list: the last of them counts.
    return found if number(found) is not None else found.rsplit(",", 1)[-1]


def hash_answer(text: str) -> str | None:
    """The number after the last `####`, or None when no number follows it directly."""
    at = text.rfind("####")
    found = _HASHES.match(text, at) if at >= 0 else None
    return found.group(1).rstrip(",").replace(" ", "") if found else None


def stated_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:", up to the end of its line or sentence; None without such words."""
    last = _last(_STATED, text)
    if last is None:
        return None
    line = text[last.end() : last.end() + MAX_ANSWER].lstrip(":*= \t\r\n").split("\n", 1)[0]
    line = re.split(r"\.\s", line, maxsplit=1)[0].strip()
    line = _HENCE_FIRST.sub("", line)
    if (
        "*" in line and line.count("**") % 2
    ):  # the stars that opened the bold went with the words before the answer
        line = line.replace("**", "", 1)
    for mark in ("$$", "$"):
        if line.startswith(mark) and line.count(mark) > 1:
            return line.split(mark)[1].strip() or None
    number_then_words = _NUMBER.match(line)
    if number_then_words and _WORDS_AFTER.match(line, number_then_words.end()):
        return number_then_words.group()
    return strip_wrapping(line) or None


def has_box(text: str) -> bool:
    """Whether a \\boxed or \\fbox is opened."""
    return _BOX.search(text) is not None


def final_answer(text: str) -> str | None:
    """The boxed answer; where no box is opened, the stated one, else the last number."""
    return boxed_answer(text) if has_box(text) else stated_answer(text) or last_number(text)


def truth_of(problem: Problem) -> str:
    """The ground truth as a short answer: a worked solution is reduced to what stands after #### or in its last box."""
    truth = problem.ground_truth
    if "####" in truth:
        truth = truth.rsplit("####", 1)[1]
    return strip_wrapping(boxed_answer(truth) or truth)


def result(answer: bool, **parts: bool) -> Score:
    """A 0/1 score whose value is the answer's."""
    return Score(
        float(answer),
        {"answer": float(answer)} | {name: float(part) for name, part in parts.items()},
    )


def unusable(problem: Problem, wanted: str) -> Failure:
    """The failure for a ground truth that this verifier cannot compare with."""
    return Failure(
        "invalid",
        f"the ground truth {problem.ground_truth[:80]!r} of problem {problem.uid} is not {wanted}",
    )


def exact(response: str, problem: Problem) -> Score | Failure:
    """1 when the response, without surrounding white space, is the ground truth."""
    if not problem.ground_truth.strip():
        return unusable(problem, "an answer")
    return result(response.strip() == problem.ground_truth.strip())


def numeric(response: str, problem: Problem) -> Score | Failure:
    """1 when the last number of the response equals the ground truth as a number: 1,234.0 is 1234, $5 is 5."""
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found = last_number(response)
    return result(found is not None and same_number(found, truth), format=found is not None)


def boxed(response: str, problem: Problem) -> Score | Failure:
    """1 when the last \\boxed answer is the ground truth as a number or as normalized LaTeX. `format`: there is such a box."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    found = boxed_answer(response)
    return result(found is not None and compare(found, truth) is True, format=found is not None)


def gsm8k(response: str, problem: Problem) -> Score | Failure:
    """1 when the number after the last `####`, else in the last box, else the last number, is the ground truth.

    `format`: the answer was marked, by `####` or a box.
    """
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found, marked = gsm8k_answer(response)
    return result(found is not None and same_number(found, truth), format=marked)


def gsm8k_answer(response: str) -> tuple[str | None, bool]:
    """The number a response ends with, and whether it is marked as the answer."""
    if (strict := hash_answer(response)) is not None:
        return strict, True
    box = boxed_answer(response)
    if box is not None and number(bare := split_unit(box)[0]) is not None:
        return bare, True
    return last_number(response), False


def gsm8k_strict(response: str, problem: Problem) -> Score | Failure:
    """1 when the number after the last `####` equals the ground truth; a response without one is wrong."""
    truth = truth_of(problem)
    if number(truth) is None:
        return unusable(problem, "a number")
    found = hash_answer(response)
    return result(found is not None and same_number(found, truth), format=found is not None)


def gsm8k_flexible(response: str, problem: Problem) -> Score | Failure:
    """1 when the last number of the response equals the ground truth, wherever it stands."""
    return numeric(response, problem)


def search(response: str, problem: Problem) -> Score | Failure:
    """1 when the text in the last <answer> is one of the accepted ones, without case, punctuation, articles and spacing.

    The ground truth is one answer, or a JSON list of them, or {"target": list}. `format`: there is a closed <answer>.
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


def choice(response: str, problem: Problem) -> Score | Failure:
    """1 when the response chooses the option of the ground truth, A to J or 1 to 9. `format`: the choice is stated plainly."""
    truth = _label(problem.ground_truth)
    if truth is None:
        return unusable(problem, "an option from A to J or 1 to 9")
    found, plain = _chosen(response, _DIGITS if truth.isdigit() else _LETTERS)
    return result(found == truth, format=plain)


def chosen_option(response: str, problem: Problem) -> str | None:
    """The option a response chooses, named as the ground truth names its own; None without a choice."""
    return _chosen(
        response, _DIGITS if (_label(problem.ground_truth) or "").isdigit() else _LETTERS
    )[0]


def _chosen(response: str, labels: _Labels) -> tuple[str | None, bool]:
    """The option that is chosen, and whether that is said plainly: in a box, after "answer is", before "is correct", or alone.

    Without a plain statement a single option in brackets counts; two different ones are no choice, nor is a list of them after "answer is".
    """
    tagged = (
        response.rpartition("<answer>")[2].partition("</answer>")[0]
        if "<answer>" in response
        else ""
    )
    for marked in (boxed_answer(response) or "", tagged):
        if (name := _label(marked)) and name in labels.names:
            return name, True
    said = _last(labels.right, response)
    for stated in reversed(list(_STATED.finditer(response))):
        if found := labels.stated.match(response, stated.end()):
            if said and said.start() > found.start():
                return said.group(1), True
            return (
                (None, False)
                if _lists_more(response, found.end(), labels)
                else (found.group(1), True)
            )
    if said:
        return said.group(1), True
    found = labels.lone.fullmatch(response.strip()) if len(response) <= MAX_ANSWER else None
    if found and not labels.option.search(found.group(2) or ""):
        return found.group(1), True
    options = set(labels.option.findall(response))
    return (options.pop(), False) if len(options) == 1 else (None, False)


def _lists_more(response: str, at: int, labels: _Labels) -> bool:
    """Whether the option that ends `at` is the first of a list, "A or B", "A, B and C", with which the sentence ends."""
    while response[at : at + 1] in (")", "*"):
        at += 1
    first = at
    while found := labels.others.match(response, at):
        at = found.end()
    return at > first and re.match(r"\s*(?:$|[.\n])", response[at : at + 3]) is not None


def _label(text: str) -> str | None:
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)|[\s(){}$*.]", "", text[:100])
    return bare if len(bare) == 1 and bare in _LETTERS.names + _DIGITS.names else None


def tagged_answers(response: str) -> tuple[bool, list[str]]:
    """Whether the response has the form `</think> <answer>...</answer>`, and the texts that may be its answer.

    One space or one newline stands between the tags; the last answer counts. In a bad format what follows `<answer>`, or else
    the answer of the whole response, is graded all the same, so that "right but badly formatted" can be counted.
    """
    before, opening, after = response.rpartition("<answer>")
    inner, closing, _ = after.partition("</answer>")
    head = before + opening
    good = bool(closing) and ("</think> <answer>" in head or "</think>\n<answer>" in head)
    text = inner if opening else response
    answers = (
        [boxed_answer(text)]
        if _BOX.search(text)
        else [inner if opening else None, stated_answer(text)]
    )
    return good, [answer for answer in answers if answer and answer.strip()]


def r1_zero(response: str, problem: Problem) -> Score | Failure:
    """R1-Zero's reward: 1 when the tags are right and the answer in them is. The parts tell the four classes apart."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    good, answers = tagged_answers(response)
    right = any(compare(answer, truth) is True for answer in answers)
    return Score(float(good and right), {"format": float(good), "answer": float(right)})
