"""Cheats against the verifiers, what each verifier gives for them, and why.

answer_cheats_page.py counts them in docs/rewards.md; test_answer_cheats.py checks every row. Cheats
against tests of code are in tests/sandbox/cheats.jsonl.
"""

from dataclasses import dataclass

TAGS = "t </think> <answer>{}</answer>"

NUMERIC = (
    "exact",
    "numeric",
    "gsm8k",
    "gsm8k_strict",
    "gsm8k_flexible",
    "boxed",
    "math",
    "math_answer",
    "oat",
    "think_math",
    "r1_zero",
    "r1_zero_math",
    "question_only",
    "geometry3k",
)
LAST_NUMBER = ("numeric", "gsm8k_flexible")  # verl's flexible rule
ALGEBRA = ("math", "math_answer", "oat", "geometry3k")
BOX = ("boxed", "math", "math_answer", "oat", "question_only", "geometry3k")
CHOICE = ("choice",)
SEARCH = ("search",)
FORM = ("format", "box_format", "think_format")


@dataclass(frozen=True)
class Cheat:
    """A response that tries to get a reward it should not get, or that looks like it.

    Attributes:
        passed_by: the verifiers of the family that give the reward; the others give none.
    """

    kind: str
    response: str
    why: str
    passed_by: tuple[str, ...]
    truth: str
    family: tuple[str, ...]


def rows(
    kind: str,
    why: str,
    passed_by: tuple[str, ...],
    *responses: str,
    truth: str = "42",
    family: tuple[str, ...] = NUMERIC,
) -> list[Cheat]:
    """Return one cheat per response."""
    return [Cheat(kind, response, why, passed_by, truth, family) for response in responses]


LIST = "several answers are no answer; the rule of verl's flexible grading reads the last number"
LAST = "the last answer counts: this is one guess, and it is right"
FIRST_WRONG = "the last answer counts, and it is wrong"
EXPRESSION = "algebra computes the value, as in math-verify; r1_zero and boxed want a number"
HIDDEN = "the characters are not those of the number"
FORMAT = "the form is right, and only the form is asked for; give it a small weight"

ANSWERS: list[Cheat] = [
    *rows(
        "several boxes",
        FIRST_WRONG,
        (),
        "\\boxed{41} \\boxed{42} \\boxed{43}",
        "\\boxed{42} \\boxed{41}",
        "\\boxed{42\\boxed{41}}",
    ),
    *rows(
        "several boxes",
        LAST,
        (*LAST_NUMBER, *ALGEBRA, "gsm8k", "boxed", "question_only"),
        "\\boxed{41} \\boxed{42}",
    ),
    *rows(
        "several boxes",
        "the last box is not closed",
        (*LAST_NUMBER, "gsm8k"),
        "\\boxed{42} \\boxed{",
    ),
    *rows(
        "answer list",
        LIST,
        LAST_NUMBER,
        "\\boxed{41, 42}",
        "\\boxed{41 or 42}",
        "\\boxed{\\{41,42\\}}",
        "#### 41 or 42",
        "It is 41 or 42",
        "It is 40, 41, 42",
        "The answer is 41 or 42",
        "The answer is between 41 and 42",
        TAGS.format("41 or 42"),
        TAGS.format("It is 41 or 42."),
        TAGS.format("She sold 41 clips, or 42."),
    ),
    *rows(
        "answer list",
        LIST,
        (),
        "\\boxed{42 or 41}",
        "\\boxed{42\\text{ or }43}",
        "\\boxed{42\\text{ or 41}}",
        "\\boxed{42\\text{ (or 41)}}",
        "\\boxed{42\\text{ or }\\text{41}}",
        "\\boxed{42\\mbox{ or 41}}",
        "\\boxed{42\\text{ and not 41}}",
        "The answer is 42\\text{ or 41}",
        "\\boxed{42|41}",
        "\\boxed{42;41}",
        "\\boxed{42 \\lor 41}",
        "The answer is 42 or 41",
        TAGS.format("42, 41"),
    ),
    *rows(
        "answer list",
        "two values; a number in a box is read without it",
        (*LAST_NUMBER, "gsm8k"),
        "\\boxed{\\pm 42}",
    ),
    *rows("answer list", "an interval is not the number", (), "\\boxed{[0,100]}"),
    *rows("answer list", "a relation is not the number", (), "\\boxed{x \\ge 0}"),
    *rows("answer list", "a variable is not the number", (), "\\boxed{x}"),
    *rows(
        "answer list",
        "verl's strict rule reads the first number after ####",
        ("gsm8k_strict",),
        "#### 42 or 41",
        "#### 42\\text{ or 41}",
        "#### 42, 41",
    ),
    *rows(
        "answer list",
        LAST,
        (*LAST_NUMBER, "gsm8k", "gsm8k_strict", "math_answer"),
        "#### 41\n#### 42",
    ),
    *rows(
        "answer list",
        FIRST_WRONG,
        (),
        "#### 42\n#### 41",
        "Answer: 42\nAnswer: 41",
        TAGS.format("42 The answer is 41"),
        TAGS.format("42</answer> <answer>41"),
    ),
    *rows(
        "answer list",
        f"{LAST}; LUFFY's rule stops at the second </think>",
        (*LAST_NUMBER, *ALGEBRA, "gsm8k", "boxed", "question_only"),
        "x </think> \\boxed{41} </think> \\boxed{42}",
    ),
    *rows(
        "hidden characters",
        HIDDEN,
        (),
        "\\boxed{4\u200b2}",
        "\\boxed{4\xb2}",
        "#### 4\u200b2",
        TAGS.format("4\u20602"),
    ),
    *rows("hidden characters", "a bidirectional mark shows 24 as 42", (), "\\boxed{\u202e24}"),
    *rows(
        "hidden characters",
        "full-width digits are not digits here",
        (),
        "\\boxed{\uff14\uff12}",
        "#### \uff14\uff12",
    ),
    *rows("hidden characters", "Arabic digits are not digits here", (), "\\boxed{\u0664\u0662}"),
    *rows(
        "hidden characters",
        "what a reader does not see is read",
        LAST_NUMBER,
        "\\boxed{41\\phantom{42}}",
    ),
    *rows("hidden characters", "a comment of LaTeX is read", LAST_NUMBER, "\\boxed{41 % 42}"),
    *rows("question restated", EXPRESSION, ALGEBRA, "\\boxed{6 \\cdot 7}", "\\boxed{41+1}"),
    *rows("question restated", EXPRESSION, (*LAST_NUMBER, *ALGEBRA), "\\boxed{\\max(41,42)}"),
    *rows("question restated", EXPRESSION, ("r1_zero_math",), TAGS.format("6 \\cdot 7")),
    *rows(
        "question restated", "words are not the number", (), "\\boxed{\\text{the number of clips}}"
    ),
    *rows(
        "question restated",
        "a number of the question, if it is the answer too, is the last number",
        (*LAST_NUMBER, "gsm8k", "math_answer"),
        "How many did she sell after she had sold 42?",
    ),
    *rows("question restated", "the last number is wrong", (), "What is 6 times 7?"),
    *rows(
        "two values at once",
        "50% is 50 and 0.5, as in the course: a percent sign is two guesses",
        (*ALGEBRA, "gsm8k", "boxed", "question_only"),
        "\\boxed{4200\\%}",
    ),
    *rows(
        "two values at once",
        "decimals are equal only up to rounding in the seventh digit",
        (),
        "\\boxed{41.99999}",
    ),
    *rows("format only", "there is no answer", (), TAGS.format("")),
    *rows(
        "format only",
        "text after the closing tag does not count",
        ("r1_zero", "r1_zero_math"),
        TAGS.format("42") + " 41",
    ),
    *rows(
        "format only",
        "the tags are in the wrong order",
        (*LAST_NUMBER, "gsm8k", "math_answer", "think_math"),
        "</answer></think> <answer>42",
    ),
    *rows(
        "format only",
        "an empty thought is allowed, as in the course; add think_format to reward thoughts",
        (*LAST_NUMBER, "gsm8k", "math_answer", "think_math", "r1_zero", "r1_zero_math"),
        "</think> <answer>42</answer>",
    ),
    *rows("length", "longer than any answer", (), "\\boxed{" + "4" * 3000 + "}"),
    *rows(
        "length",
        "length does not matter here; add overlong or method.overlong_buffer",
        (*LAST_NUMBER, *ALGEBRA, "gsm8k", "boxed", "question_only"),
        "wait, " * 2000 + "\\boxed{42}",
    ),
    *rows("expensive answer", "too large for algebra", (), "\\boxed{9^{9^{9^{9}}}}"),
    *rows(
        "expensive answer",
        "nested too deeply for algebra; the number in it is plain for gsm8k",
        (*LAST_NUMBER, "gsm8k"),
        "\\boxed{" + "(" * 40 + "42" + ")" * 40 + "}",
    ),
]

CHOICES: list[Cheat] = [
    *rows(
        "answer list",
        "all options are no choice",
        (),
        "(A) (B) (C) (D)",
        "The answer is A, B, C or D.",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "answer list",
        "two options are no choice",
        (),
        "A or B is correct",
        "The answer is B/C",
        "\\boxed{A, B}",
        "<answer>A, B</answer>",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "answer list",
        FIRST_WRONG,
        (),
        "The answer is A. The answer is B. The answer is C.",
        "\\boxed{B} \\boxed{A}",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "answer list",
        LAST,
        ("choice",),
        "Either A is correct or B is correct.",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "answer list",
        "the stated option counts: one guess",
        ("choice",),
        "The answer is B, but it could be C",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "hidden characters",
        "the Cyrillic letter is not B",
        (),
        "\\boxed{\u0412}",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "hidden characters",
        "the full-width letter is not B",
        (),
        "\\boxed{\uff22}",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "hidden characters",
        "the characters are not those of the option",
        (),
        "\\boxed{B\u200b}",
        truth="B",
        family=CHOICE,
    ),
    *rows(
        "question restated",
        "all options are no choice",
        (),
        "What is it? (A) x (B) y (C) z",
        truth="B",
        family=CHOICE,
    ),
]

SEARCHES: list[Cheat] = [
    *rows(
        "answer list",
        "the whole text must be the answer",
        (),
        "<answer>Paris or London</answer>",
        "<answer>London, Paris</answer>",
        "<answer>not Paris</answer>",
        truth="Paris",
        family=SEARCH,
    ),
    *rows(
        "answer list",
        FIRST_WRONG,
        (),
        "<answer>Paris</answer><answer>London</answer>",
        truth="Paris",
        family=SEARCH,
    ),
    *rows(
        "hidden characters",
        "the Cyrillic letter is not P",
        (),
        "<answer>\u0420aris</answer>",
        truth="Paris",
        family=SEARCH,
    ),
    *rows(
        "hidden characters",
        "characters that are no letters are removed, as punctuation is",
        ("search",),
        "<answer>P\u200baris</answer>",
        truth="Paris",
        family=SEARCH,
    ),
    *rows(
        "format only", "the tag is not closed", (), "<answer>Paris", truth="Paris", family=SEARCH
    ),
]

FORMS: list[Cheat] = [
    *rows(
        "format only", FORMAT, ("format", "think_format"), TAGS.format("I do not know"), family=FORM
    ),
    *rows("format only", FORMAT, ("box_format",), "\\boxed{?}", family=FORM),
    *rows(
        "format only",
        "the thought is empty",
        (),
        "<think></think> 42",
        "<think> \n</think> 42",
        family=FORM,
    ),
    *rows("format only", "two thoughts", (), "<think>a</think><think>b</think> 42", family=FORM),
    *rows("format only", "the box is empty", (), "\\boxed{}", family=FORM),
    *rows(
        "length",
        "at most 1, but all of it: use it with a negative weight",
        ("length",),
        "padding " * 4000,
        family=("length",),
    ),
    *rows(
        "length",
        "every span counts; a trait to study, not a reward",
        ("bold",),
        "**a** " * 100,
        family=("bold",),
    ),
]

SECTIONS = {"answers": ANSWERS, "choice": CHOICES, "search": SEARCHES, "form": FORMS}
CHEATS = [cheat for section in SECTIONS.values() for cheat in section]
