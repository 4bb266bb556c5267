"""Mathematics: GSM8K, MATH and the competition sets. Most differ in their column names only."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from postgrad.data.boxes import BOX, last_box
from postgrad.data.encode.styles import THINK
from postgrad.data.prepare.base import (
    Context,
    DataSet,
    Draft,
    Drop,
    Option,
    first_text,
    select_columns,
)
from postgrad.data.rows.fields import FINAL_ANSWER
from postgrad.data.rows.values import Row, truth_of

QUESTION = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "final_answer", "expected_answer", "Answer")
SOLUTION = ("solution", "Solution", "generated_solution")
EXTRA_COLUMNS = (
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
_YEAR = re.compile(r"(20[0-9]{2})_A(?:IME|MC)")


def short_answer(value: Any) -> str:
    """A ground truth as a short answer.

    142.0 becomes 142, a list is joined with commas, and a worked solution becomes the text after
    its #### or in its last box.
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    text = truth_of(value, "answer")
    if hashes := FINAL_ANSWER.search(text):
        return hashes[1].replace(",", "")
    return last_box(text) if BOX.search(text) else text.strip()


def question_and_answer(row: Row, context: Context) -> Draft:
    """The question and the short answer; without an answer column, the solution's answer."""
    question = first_text(row, QUESTION)
    answer = _answer_column(row)
    if answer is None:
        solution = first_text(row, SOLUTION)
        if not BOX.search(solution) and not FINAL_ANSWER.search(solution):
            raise Drop("no answer: no column for it, and no box in the solution")
        answer = solution
    truth = short_answer(answer)
    if not truth:
        raise Drop("no answer: the solution's last box is not closed")
    return Draft(question, truth, extra=select_columns(row, EXTRA_COLUMNS))


def _answer_column(row: Row) -> Any:
    """The value of the first answer column that is not empty, or None."""
    return next((row[name] for name in ANSWER if row.get(name) not in (None, "", [])), None)


def with_solution(row: Row, context: Context) -> Draft:
    """As question_and_answer, with the solution as a demonstration if it has a boxed answer."""
    draft = question_and_answer(row, context)
    solution = next((row[name] for name in SOLUTION if isinstance(row.get(name), str)), "")
    return replace(draft, demonstrations=(solution,) if last_box(solution) else ())


def gsm8k(row: Row, context: Context) -> Draft:
    """A question whose worked solution ends in `#### NUMBER`."""
    answer = first_text(row, ("answer", "solution"))
    if not FINAL_ANSWER.search(answer):
        raise Drop("no answer: it does not end in `#### NUMBER`")
    return Draft(first_text(row, QUESTION), short_answer(answer), (answer,))


def of_year(row: Row, context: Context) -> Draft:
    """A competition problem of the year that option `year` names.

    The year comes from the column `year`, or from the url or id; a row without one is kept.
    """
    requested = context.options["year"]
    match = _YEAR.search(str(row.get("url") or row.get("id") or ""))
    year = str(row.get("year") or (match[1] if match else requested))
    if requested not in ("all", year):
        raise Drop("from another year")
    return question_and_answer(row, context)


def olympiad(row: Row, context: Context) -> Draft:
    """A problem of OlympiadBench; problems with pictures and proofs are dropped."""
    has_image = any(row.get(f"image_{i}") is not None for i in range(1, 10))
    if has_image or row.get("modality") == "Multimodal":
        raise Drop("needs a picture")
    if _answer_column(row) is None:
        raise Drop("a proof, which has no answer to compare with")
    draft = question_and_answer(row, context)
    question = draft.question
    introduction = row.get("context")
    if isinstance(introduction, str) and introduction.strip():
        question = f"{introduction}\n\n{question}"
    extra = dict(draft.extra)
    if row.get("unit"):
        extra["unit"] = row["unit"]
    return Draft(question, draft.truth, extra=extra)


def deepmath(row: Row, context: Context) -> Draft:
    """A problem of DeepMath with up to three R1 solutions as demonstrations."""
    names = ("r1_solution_1", "r1_solution_2", "r1_solution_3")
    solutions = [row[name] for name in names if isinstance(row.get(name), str)]
    draft = question_and_answer(row, context)
    return replace(draft, demonstrations=tuple(solutions[: context.options["demonstrations"]]))


def openr1(row: Row, context: Context) -> Draft:
    """LUFFY's filter of OpenR1-Math.

    The demonstration is the first generation that math-verify accepts, that is complete, and that
    is at most `max_tokens` long. Kinds `train` and `sft` keep the problems that have one; kind
    `sft_rl` keeps the others, without a demonstration.
    """
    if row.get("answer") in (None, ""):
        raise Drop("no answer")
    draft = question_and_answer(row, context)
    kind = context.options["kind"]
    limit = context.options["max_tokens"]
    correct = _correct_generations(row)
    target = _first_short(correct, context.count_tokens, limit)
    if kind == "sft_rl":
        if target is not None:
            raise Drop("in the training set: it has a correct, complete and short generation")
        return draft
    if not correct:
        raise Drop("no generation is correct and complete")
    if target is None:
        raise Drop(f"every correct generation is longer than {limit} tokens")
    if kind == "sft":
        target = target.removeprefix(THINK)
    return replace(draft, demonstrations=(target,))


def _correct_generations(row: Row) -> list[str]:
    """The generations that math-verify accepts and that are complete."""
    generations = row.get("generations") or []
    is_correct = row.get("correctness_math_verify") or []
    is_complete = row.get("is_reasoning_complete") or [True] * len(generations)
    correct: list[str] = []
    for text, *flags in zip(generations, is_correct, is_complete, strict=False):
        if all(flags):
            correct.append(text)
    return correct


def _first_short(
    texts: list[str], count_tokens: Callable[[str], int] | None, limit: int
) -> str | None:
    """The first text of at most `limit` tokens; without a tokenizer, the first text."""
    for text in texts:
        if count_tokens is None or count_tokens(text) <= limit:
            return text
    return None


def hold_out(keys: list[str], groups: list[str], options: dict[str, Any], split: str) -> set[int]:
    """Splits MATH's training rows: `held_out` rows per category are `eval`, the others `train`."""
    if split == "test":
        return set(range(len(keys)))
    held: set[int] = set()
    for group in sorted(set(groups)):
        held |= set(seeded_order(keys, groups, group, options["seed"])[: options["held_out"]])
    return held if split == "eval" else set(range(len(keys))) - held


def seeded_order(keys: list[str], groups: list[str], group: str, seed: int) -> list[int]:
    """Indices of a group's problems, shuffled by the seed and their texts, not by row order."""
    members = [i for i, name in enumerate(groups) if name == group]

    def sort_key(i: int) -> bytes:
        text = f"{seed}:{keys[i]}".encode()
        return hashlib.blake2b(text, digest_size=8, person=b"divide").digest()

    return sorted(members, key=sort_key)


def _year_option(year: str) -> dict[str, Option]:
    return {"year": Option(year, "keep this year, where a row says its year; all: every year")}


MATH: dict[str, DataSet] = {
    "gsm8k": DataSet(
        "grade-school word problems with worked solutions",
        "openai/gsm8k",
        {"train": ("main/train-*.parquet",), "test": ("main/test-*.parquet",)},
        gsm8k,
        "openai/gsm8k",
        style="hash",
    ),
    "hendrycks_math": DataSet(
        "MATH: competition problems in seven categories",
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
                100, "training rows per category that are in the split eval, not in train"
            ),
            "seed": Option(0, "random seed of the rows held out"),
            "pairs": Option(
                "none",
                "similar: pair each problem with another of its type and level (Classmate-CoT)",
                ("none", "similar"),
            ),
        },
        group="type",
        select_split=hold_out,
        pair_by=("type", "level"),
        note="MATH-500 is part of the test split, not of train",
    ),
    "math500": DataSet(
        "500 problems of MATH's test split",
        "HuggingFaceH4/MATH-500",
        {"test": ("test.jsonl",)},
        question_and_answer,
        "HuggingFaceH4/MATH-500",
        local=("*math500*", "*math_500*", "*math-500*"),
        style="boxed_system",
    ),
    "aime": DataSet(
        "AIME of 2022, 2023 and 2024",
        "AI-MO/aimo-validation-aime",
        {"test": ("data/train-*.parquet",)},
        of_year,
        "aime",
        local=("*aime*",),
        style="boxed_system",
        options=_year_option("all"),
    ),
    "aime22": DataSet(
        "AIME 2022, both parts",
        "AI-MO/aimo-validation-aime",
        {"test": ("data/train-*.parquet",)},
        of_year,
        "aime22",
        local=("*aime*22*",),
        style="boxed_system",
        options=_year_option("2022"),
    ),
    "aime23": DataSet(
        "AIME 2023, both parts",
        "AI-MO/aimo-validation-aime",
        {"test": ("data/train-*.parquet",)},
        of_year,
        "aime23",
        local=("*aime*23*",),
        style="boxed_system",
        options=_year_option("2023"),
    ),
    "aime24": DataSet(
        "AIME 2024, both parts",
        "HuggingFaceH4/aime_2024",
        {"test": ("data/train-*.parquet",)},
        of_year,
        "aime24",
        local=("*aime*24*",),
        style="boxed_system",
        options=_year_option("2024"),
    ),
    "aime25": DataSet(
        "AIME 2025, both parts",
        "opencompass/AIME2025",
        {"test": ("aime2025*.jsonl",)},
        of_year,
        "aime25",
        local=("*aime*25*",),
        style="boxed_system",
        options=_year_option("2025"),
    ),
    "amc83": DataSet(
        "83 problems of AMC 12, 2022 and 2023 (LUFFY, CS336)",
        "AI-MO/aimo-validation-amc",
        {"test": ("data/train-*.parquet",)},
        question_and_answer,
        "amc",
        local=("*amc*",),
        style="boxed_system",
    ),
    "amc23": DataSet(
        "AMC 12 of 2023",
        "math-ai/amc23",
        {"test": ("test-*.parquet", "data/test-*.parquet", "test.jsonl")},
        of_year,
        "amc23",
        local=("*amc*",),
        style="boxed_system",
        options=_year_option("2023"),
    ),
    "minerva": DataSet(
        "Minerva: university-level mathematics and science",
        "math-ai/minervamath",
        {"test": ("test-*.parquet", "data/test-*.parquet", "test.jsonl")},
        question_and_answer,
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
                1, "how many of up to three R1 solutions are kept as demonstrations"
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
