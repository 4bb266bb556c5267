"""The verifier of multiple choice: which option a response chooses.

It takes linear time in the length of the response.
"""

import re
from dataclasses import dataclass

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.grading.answers import (
    HENCE,
    STATED,
    boxed_answer,
    last_match,
    result,
    unusable,
)
from postgrad.verifiers.grading.equality import MAX_ANSWER

# After an option: "B is correct", "Option (B) is the right answer".
_IS_RIGHT = (
    r"[)\]}*$.]{0,4}\s{1,3}(?:is|would be|seems)\s{1,3}(?:the\s{1,3})?(?:most\s{1,3})?"
    r"(?i:correct|right|true|best|answer)\b"
)


@dataclass(frozen=True)
class _Labels:
    """The names of a question's options, and the patterns that find one."""

    names: str
    stated: re.Pattern[str]  # after "answer is"
    lone: re.Pattern[str]  # as the whole response
    option: re.Pattern[str]  # in brackets
    right: re.Pattern[str]  # before "is correct"
    others: re.Pattern[str]  # one more option in a list, after the first
    listed: re.Pattern[str]  # before an option: it is not the first of a list

    @staticmethod
    def of(names: str, plain: str) -> "_Labels":
        """Return the patterns; `plain` is how a name is written after "answer is"."""
        lead = (
            rf"(?:\s|[*$:({{\[\"'`“‘]|\\\(|(?i:option|choice|letter|{HENCE})\b"
            r"|\\(?:text|textbf|mathrm|mathbf|boxed)\b){0,8}"
        )
        lone = (
            rf"(?:(?i:option|choice)\s)?[\s*(\[$]{{0,6}}([{names}])"
            r"(?:\*{0,2}[.):]\*{0,2}(?=\s)([^\n]{0,200})|[\s*)\].:$]{0,6})"
        )
        others = (
            r"\s{0,2}(?:,|/|&|or\b|and\b| )\s{0,2}(?:or\s|and\s)?"
            rf"[(*]{{0,3}}[{names}][)*]{{0,3}}(?=[\s.,/&]|$)"
        )
        return _Labels(
            names,
            stated=re.compile(f"{lead}({plain})", re.MULTILINE),
            lone=re.compile(lone),
            option=re.compile(rf"\(([{names}])\)"),
            right=re.compile(rf"(?<![\w'’])([{names}]){_IS_RIGHT}"),
            others=re.compile(others),
            listed=re.compile(
                rf"(?<!\w)[{names}][)*]{{0,3}}\s{{0,2}}(?:,|/|&|or|and)[\s(*]{{0,3}}\Z"
            ),
        )


# A, I and numbers are also words of prose. They count only at the end of a line or before
# punctuation, and A also before a reason.
_LETTERS = _Labels.of(
    "ABCDEFGHIJ",
    r"[B-HJ](?![A-Za-z0-9])(?!['’][A-Za-z])|[AI](?=[)\].,;:*$}\"'`”’\\]|\s{0,3}$)(?!['’][A-Za-z])"
    r"|A(?=\s(?:because|since|as|due|and|or)\s)",
)
_DIGITS = _Labels.of("123456789", r"[1-9](?=[)\].,;:*$}](?![0-9])|\s{0,3}$)")


def choice(response: str, problem: Problem) -> Score | Failure:
    """1 if the response chooses the option of the ground truth, A to J or 1 to 9.

    Part `format`: the choice is stated plainly (see _chosen).
    """
    truth = _label(problem.ground_truth)
    if truth is None:
        return unusable(problem, "an option from A to J or 1 to 9")
    found, plain = _chosen(response, _DIGITS if truth.isdigit() else _LETTERS)
    return result(found == truth, format=plain)


def chosen_option(response: str, problem: Problem) -> str | None:
    """Return the option that a response chooses, or None.

    It is a letter or a digit, as in the ground truth.
    """
    truth = _label(problem.ground_truth) or ""
    return _chosen(response, _DIGITS if truth.isdigit() else _LETTERS)[0]


def _chosen(response: str, labels: _Labels) -> tuple[str | None, bool]:
    """Return the chosen option, and whether it is stated plainly.

    Plainly means: in a box, after "answer is", before "is correct", or alone. Otherwise a single
    option in brackets counts. Two different ones are no choice, and neither is a list of options
    after "answer is".
    """
    tagged = ""
    if "<answer>" in response:
        tagged = response.rpartition("<answer>")[2].partition("</answer>")[0]
    for marked in (boxed_answer(response) or "", tagged):
        name = _label(marked)
        if name and name in labels.names:
            return name, True
    called_right = last_match(labels.right, response)
    if called_right and _is_listed(response, called_right.start(), labels):
        return None, False
    for statement in reversed(list(STATED.finditer(response))):
        stated = labels.stated.match(response, statement.end())
        if not stated:
            continue
        if called_right and called_right.start() > stated.start():
            return called_right.group(1), True
        if _starts_list(response, stated.end(), labels):
            return None, False
        return stated.group(1), True
    if called_right:
        return called_right.group(1), True
    lone = labels.lone.fullmatch(response.strip()) if len(response) <= MAX_ANSWER else None
    if lone and not labels.option.search(lone.group(2) or ""):
        return lone.group(1), True
    options = set(labels.option.findall(response))
    return (options.pop() if len(options) == 1 else None), False


def _is_listed(response: str, start: int, labels: _Labels) -> bool:
    """Return whether the option at `start` follows another one: "A or B"."""
    return labels.listed.search(response, max(0, start - 12), start) is not None


def _starts_list(response: str, end: int, labels: _Labels) -> bool:
    """Return whether the option before `end` starts a list ("A or B") that ends the sentence."""
    while response[end : end + 1] in (")", "*"):
        end += 1
    list_end = end
    while match := labels.others.match(response, list_end):
        list_end = match.end()
    if list_end == end:
        return False
    return re.match(r"\s*(?:$|[.\n])", response[list_end : list_end + 3]) is not None


def _label(text: str) -> str | None:
    """Return the option that the text is, without brackets and LaTeX, or None."""
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)|[\s(){}$*.]", "", text[:100])
    return bare if len(bare) == 1 and bare in _LETTERS.names + _DIGITS.names else None
