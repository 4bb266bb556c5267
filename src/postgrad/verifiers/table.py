"""The built-in verifiers by name, and the one that `reward.verifier=auto` takes per data source."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from postgrad.errors import Missing
from postgrad.pictures import text_of_content
from postgrad.problem import Problem, problem_label


@dataclass(frozen=True)
class VerifierSpec:
    """Where a verifier's function is, and how it must be run.

    Attributes:
        path: `package.module:function` or `file.py:function`.
        inline: it takes linear time and cannot crash, so it runs in this process; the other
            verifiers run in the pool's child processes.
        time_limit_s: it stops itself within this time; the pool's limit for it is not shorter.
        is_own: it is the user's function.
        arguments: numbers from the setting, as in length(limit=100).
    """

    path: str
    inline: bool = False
    time_limit_s: float = 0.0
    is_own: bool = False
    arguments: dict[str, float] = field(default_factory=dict)


GRADING = "postgrad.verifiers.grading"


def _inline(path: str) -> VerifierSpec:
    return VerifierSpec(f"{GRADING}.{path}", inline=True)


VERIFIERS: dict[str, VerifierSpec] = {
    "exact": _inline("answers:exact"),
    "numeric": _inline("answers:numeric"),
    "boxed": _inline("answers:boxed"),
    "gsm8k": _inline("answers:gsm8k"),
    "gsm8k_strict": _inline("answers:gsm8k_strict"),
    "gsm8k_flexible": VerifierSpec(f"{GRADING}.answers:gsm8k_flexible", inline=True),
    "choice": _inline("choice:choice"),
    "search": _inline("answers:search"),
    "format": _inline("form:tag_format"),
    "box_format": _inline("form:box_format"),
    "think_format": _inline("form:think_format"),
    "length": _inline("form:length"),
    "overlong": _inline("form:overlong"),
    "bold": _inline("form:bold"),
    "environment": _inline("environment:environment"),
    "math": VerifierSpec(f"{GRADING}.math:math"),
    "math_answer": VerifierSpec(f"{GRADING}.math:math_answer"),
    "oat": VerifierSpec(f"{GRADING}.math:oat"),
    "think_math": VerifierSpec(f"{GRADING}.math:think_math"),
    "r1_zero": VerifierSpec(f"{GRADING}.r1_zero:r1_zero"),
    "r1_zero_math": VerifierSpec(f"{GRADING}.r1_zero:r1_zero_math"),
    "question_only": VerifierSpec(f"{GRADING}.r1_zero:question_only"),
    "geometry3k": VerifierSpec(f"{GRADING}.math:geometry3k"),
    "reasoning_gym": VerifierSpec(f"{GRADING}.reasoning_gym:reasoning_gym"),
    "code": VerifierSpec(f"{GRADING}.code:code", time_limit_s=90.0),
}

# (pattern, verifier): the first pattern that matches the data source counts, in lower case.
SOURCES: tuple[tuple[str, str], ...] = (
    ("reasoning_gym/*", "reasoning_gym"),
    ("arithmetic/digits", "exact"),
    ("arithmetic/picture", "exact"),
    ("scenes/*", "exact"),
    ("arithmetic/boxed", "boxed"),
    ("*gsm8k*", "gsm8k"),
    ("*mmlu*", "choice"),
    ("*gpqa*", "choice"),
    ("arc", "choice"),
    ("arc[-_]*", "choice"),
    ("*[/_]arc", "choice"),
    ("*[/_]arc[-_]*", "choice"),
    ("searchr1*", "search"),
    ("*geometry3k*", "geometry3k"),
    ("*[/_-]geo3k*", "geometry3k"),
    ("geo3k*", "geometry3k"),
    ("code", "code"),
    ("code[-_]*", "code"),
    ("*humaneval*", "code"),
    ("*mbpp*", "code"),
    ("*codecontests*", "code"),
    ("*code_contests*", "code"),
    ("*codeforces*", "code"),
    ("*livecodebench*", "code"),
    ("apps", "code"),
    ("*[/_]apps", "code"),
    ("taco", "code"),
    ("*[/_]taco", "code"),
    ("math", "math"),
    ("math[-_ ]*", "math"),
    ("competition_math*", "math"),
    ("*openmathreasoning*", "math"),
    ("omr[0-9]*", "math"),
    ("*math500*", "math"),
    ("*math-500*", "math"),
    ("*hendrycks_math*", "math"),
    ("lighteval/math*", "math"),
    ("*/math-lighteval", "math"),
    ("*deepmath*", "math"),
    ("*deepscaler*", "math"),
    ("*openr1-math*", "math"),
    ("*numina*", "math"),
    ("qwen_*", "math"),
    ("aime*", "math"),
    ("*[/_]aime*", "math"),
    ("amc*", "math"),
    ("*[/_]amc*", "math"),
    ("*olympiad*", "math"),
    ("*minerva*", "math"),
)


# What `auto` should say about a verifier that differs from other systems' default.
NOTES: dict[str, str] = {
    "gsm8k": "reward.verifier=auto scores GSM8K by gsm8k: the number after ####, else in a box, "
    "else the last number; verl's default accepts only ####: reward.verifier=gsm8k_strict",
}


def choose(problem: Problem) -> str:
    """Return the name of the verifier for a problem's data source.

    A problem without a data source is taken for math if its prompt asks for a \\boxed answer. A
    math prompt that asks for a last line "Answer: ..." and not for a box (as DAPO's prompts do)
    is scored by that line.

    Raises:
        ConfigError: no pattern matches the data source.
    """
    source = problem.data_source.strip().lower()
    prompt = "\n".join(text_of_content(message.get("content", "")) for message in problem.messages)
    asks_for_box = "\\boxed" in prompt
    if not source and asks_for_box:
        return "math"
    for pattern, name in SOURCES:
        if not fnmatchcase(source, pattern):
            continue
        if name == "math" and "Answer:" in prompt and not asks_for_box:
            return "math_answer"
        return name
    raise Missing(
        f"{problem_label(problem)}: no verifier is known for data_source {problem.data_source!r}, "
        "which is the file's name where rows have none; set reward.verifier (from Python: reward=) "
        "to exact, numeric, math or another one of docs/rewards.md, or to your own file.py:NAME",
        at="reward.verifier",
    )
