"""Mathematics: GSM8K, MATH and the olympiad sets, whose rows differ in little more than the names of their columns."""

import hashlib
import re
from typing import Any

from postgrad.data.prepare.base import Context, DataSet, Draft, Drop, Option, first_text
from postgrad.data.rows import Row, truth_of
from postgrad.data.schemas import GSM8K_TRUTH
from postgrad.data.styles import THINK

QUESTION = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "final_answer", "expected_answer", "Answer")
SOLUTION = ("solution", "Solution", "generated_solution")
KEPT = (
    "level",
    "type",
    "subject",
    "subfield",
    "difficulty",
    "topic",
    "year",
    "url",
    "id",
    "unique_id",
    "uuid",
    "source",
    "problem_type",
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_YEAR = re.compile(r"(20[0-9]{2})_A(?:IME|MC)")


def last_box(text: str) -> str:
    """The content of the last \\boxed or \\fbox of a solution, or "" when there is none or it does not close."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return ""
    rest = text[boxes[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split("\n")[0].strip()
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return rest[1 : mark.start()].strip()
    return ""


def short_answer(value: Any) -> str:
    """A truth as a short answer: 142.0 is 142, a list's items stand side by side, a worked solution is its #### or last box."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    text = truth_of(value, "answer")
    if hashes := GSM8K_TRUTH.search(text):
        return hashes[1].replace(",", "")
    return last_box(text) if _BOX.search(text) else text.strip()


def maths(row: Row, context: Context) -> Draft:
    """Question and short answer by the names these columns go by; the solution is the truth where no answer stands beside it."""
    question = first_text(row, QUESTION)
    answer = next((row[name] for name in ANSWER if row.get(name) not in (None, "", [])), None)
    if answer is None:
        solution = first_text(row, SOLUTION)
        if not _BOX.search(solution) and not GSM8K_TRUTH.search(solution):
            raise Drop("no answer: no column for it, and no box in the solution")
        answer = solution
    truth = short_answer(answer)
    if not truth:
        raise Drop("no answer: the solution's last box does not close")
    return Draft(
        question, truth, extra={name: row[name] for name in KEPT if row.get(name) is not None}
    )


def with_solution(row: Row, context: Context) -> Draft:
    """As maths, and a solution that ends in a box is a demonstration."""
    draft = maths(row, context)
    solution = next((row[name] for name in SOLUTION if isinstance(row.get(name), str)), "")
    return Draft(
        draft.question, draft.truth, (solution,) if last_box(solution) else (), draft.extra
    )


def gsm8k(row: Row, context: Context) -> Draft:
    answer = first_text(row, ("answer", "solution"))
    if not GSM8K_TRUTH.search(answer):
        raise Drop("no answer: it does not end in `#### NUMBER`")
    return Draft(first_text(row, QUESTION), short_answer(answer), (answer,))


def of_year(row: Row, context: Context) -> Draft:
    """Contests of one year, where a row says of which it is."""
    wanted, found = (
        context.options["year"],
        _YEAR.search(str(row.get("url") or row.get("id") or "")),
    )
    year = str(row.get("year") or (found[1] if found else wanted))
    if wanted not in ("all", year):
        raise Drop("of another year")
    return maths(row, context)


def olympiad(row: Row, context: Context) -> Draft:
    if (
        any(row.get(f"image_{i}") is not None for i in range(1, 10))
        or row.get("modality") == "Multimodal"
    ):
        raise Drop("needs a picture")
    if not any(row.get(name) not in (None, "", []) for name in ANSWER):
        raise Drop("a proof, which has no answer to compare with")
    draft = maths(row, context)
    context_text = row.get("context")
    question = (
        f"{context_text}\n\n{draft.question}"
        if isinstance(context_text, str) and context_text.strip()
        else draft.question
    )
    return Draft(
        question,
        draft.truth,
        extra=draft.extra | ({"unit": row["unit"]} if row.get("unit") else {}),
    )


def deepmath(row: Row, context: Context) -> Draft:
    draft = maths(row, context)
    solutions = [
        row[name]
        for name in ("r1_solution_1", "r1_solution_2", "r1_solution_3")
        if isinstance(row.get(name), str)
    ]
    return Draft(
        draft.question,
        draft.truth,
        tuple(solutions[: context.options["demonstrations"]]),
        draft.extra,
    )


def openr1(row: Row, context: Context) -> Draft:
    """LUFFY's filter: right by math-verify and complete, then short enough; the first that is left is the demonstration.

    `train` and `sft` keep the problems that have one, `sft_rl` keeps the others, without demonstration.
    """
    if row.get("answer") in (None, ""):
        raise Drop("no answer")
    draft, kind = maths(row, context), context.options["kind"]
    generations, right = row.get("generations") or [], row.get("correctness_math_verify") or []
    complete = row.get("is_reasoning_complete") or [True] * len(generations)
    usable = [text for text, *good in zip(generations, right, complete, strict=False) if all(good)]
    limit, count = context.options["max_tokens"], context.count_tokens
    short = usable if count is None else _short(usable, count, limit)
    if kind == "sft_rl":
        if short:
            raise Drop("in the training set: it has a right, complete and short generation")
        return draft
    if not short:
        raise Drop(
            f"every right generation is longer than {limit} tokens"
            if usable
            else "no generation is right and complete"
        )
    target = short[0].removeprefix(THINK) if kind == "sft" else short[0]
    return Draft(draft.question, draft.truth, (target,), draft.extra)


def _short(texts: list[str], count: Any, limit: int) -> list[str]:
    """The first of the texts that is within the limit: the others need not be counted."""
    return next(([text] for text in texts if count(text) <= limit), [])


def hold_out(keys: list[str], groups: list[str], options: dict[str, Any], split: str) -> set[int]:
    """MATH's training rows: `held_out` of each category, drawn by the seed, are `eval`, the others `train`."""
    if split == "test":
        return set(range(len(keys)))
    held: set[int] = set()
    for group in sorted(set(groups)):
        held |= set(drawn_order(keys, groups, group, options["seed"])[: options["held_out"]])
    return held if split == "eval" else set(range(len(keys))) - held


def drawn_order(keys: list[str], groups: list[str], group: str, seed: int) -> list[int]:
    """The numbers of a group's problems in an order drawn by the seed from their texts, whatever order the rows came in."""
    members = [i for i, name in enumerate(groups) if name == group]
    return sorted(
        members,
        key=lambda i: hashlib.blake2b(
            f"{seed}:{keys[i]}".encode(), digest_size=8, person=b"divide"
        ).digest(),
    )


def _contest(year: str) -> dict[str, Option]:
    return {"year": Option(year, "keep this year where a row says its year; all: every year")}


MATHS: dict[str, DataSet] = {
    "gsm8k": DataSet(
        "grade-school word problems, answers with worked solutions",
        "openai/gsm8k",
        {"train": ("main/train-*.parquet",), "test": ("main/test-*.parquet",)},
        gsm8k,
        "openai/gsm8k",
        style="hash",
    ),
    "hendrycks_math": DataSet(
        "MATH: competition problems of seven categories",
        "EleutherAI/hendrycks_math",
        {
            "train": ("*/train-*.parquet",),
            "test": ("*/test-*.parquet",),
            "eval": ("*/train-*.parquet",),
        },
        with_solution,
        "EleutherAI/hendrycks_math",
        local=("*hendrycks*", "*competition_math*"),
        style="boxed",
        options={
            "held_out": Option(
                100, "training rows of each category that are the split eval, and not in train"
            ),
            "seed": Option(0, "of the rows held out"),
        },
        group="type",
        divide=hold_out,
        note="MATH-500 is a part of the test split, not of train",
    ),
    "math500": DataSet(
        "500 problems of MATH's test split",
        "HuggingFaceH4/MATH-500",
        {"test": ("test.jsonl",)},
        maths,
        "HuggingFaceH4/MATH-500",
        local=("*math500*", "*math_500*", "*math-500*"),
        style="boxed_system",
    ),
    "aime24": DataSet(
        "AIME 2024, both parts",
        "HuggingFaceH4/aime_2024",
        {"test": ("data/train-*.parquet",)},
        of_year,
        "aime24",
        local=("*aime*24*",),
        style="boxed_system",
        options=_contest("2024"),
    ),
    "aime25": DataSet(
        "AIME 2025, both parts",
        "opencompass/AIME2025",
        {"test": ("aime2025*.jsonl",)},
        of_year,
        "aime25",
        local=("*aime*25*",),
        style="boxed_system",
        options=_contest("2025"),
    ),
    "amc23": DataSet(
        "AMC 12 of 2023",
        "math-ai/amc23",
        {"test": ("test-*.parquet", "data/test-*.parquet", "test.jsonl")},
        of_year,
        "amc23",
        local=("*amc*",),
        style="boxed_system",
        options=_contest("2023"),
    ),
    "minerva": DataSet(
        "Minerva: university problems of mathematics and science",
        "math-ai/minervamath",
        {"test": ("test-*.parquet", "data/test-*.parquet", "test.jsonl")},
        maths,
        "minerva",
        local=("*minerva*",),
        style="boxed_system",
    ),
    "olympiadbench": DataSet(
        "OlympiadBench: English, text only, with an answer",
        "Hothan/OlympiadBench",
        {"test": ("OE_TO_maths_en_COMP/*.parquet",)},
        olympiad,
        "olympiadbench",
        local=("*olympiad*",),
        style="boxed_system",
    ),
    "deepmath": DataSet(
        "DeepMath-103K: hard problems with verifiable answers",
        "zwhe99/DeepMath-103K",
        {"train": ("data/train-*.parquet",)},
        deepmath,
        "zwhe99/DeepMath-103K",
        local=("*deepmath*",),
        style="boxed_system",
        options={
            "demonstrations": Option(
                1, "of up to three R1 solutions, how many are kept as demonstrations"
            )
        },
    ),
    "openr1-math": DataSet(
        "OpenR1-Math-220k with DeepSeek-R1's generations: LUFFY's training, SFT and SFT+RL sets",
        "open-r1/OpenR1-Math-220k",
        {"train": ("data/train-*.parquet",)},
        openr1,
        "openr1-math",
        local=("*openr1*",),
        style="luffy",
        options={
            "kind": Option(
                "train",
                "train and sft: problems with a usable generation; sft_rl: the others",
                ("train", "sft", "sft_rl"),
            ),
            "max_tokens": Option(8192, "longest generation, counted with tokenizer=MODEL"),
        },
    ),
}
