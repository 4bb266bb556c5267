"""The training sets of the CS336 toolkit: OpenMathReasoning and MATH in one file."""

from typing import Any

from postgrad.data.prepare.base import Context, DataSet, Draft, Drop, Option, first_text
from postgrad.data.prepare.math import QUESTION, seeded_order, short_answer, with_solution
from postgrad.data.rows.values import Row
from postgrad.errors import ConfigError


def open_math_reasoning(row: Row, context: Context) -> Draft:
    """A problem of OpenMathReasoning with DeepSeek-R1's solution as the demonstration.

    The text after </think> is put between answer tags if `tags=answer`. With `max_tokens`, rows
    whose question and solution have that many tokens or more are dropped.
    """
    rate = row.get("pass_rate_72b_tir")
    try:
        pass_rate = float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise Drop("no numeric pass_rate_72b_tir") from None
    question = first_text(row, QUESTION)
    solution = first_text(row, ("generated_solution",)).removeprefix("<think>")
    limit = context.options["max_tokens"]
    if limit and context.count_tokens is None:
        raise ConfigError("max_tokens counts tokens; add tokenizer=MODEL")
    if limit and context.count_tokens and context.count_tokens(question + solution) >= limit:
        raise Drop(f"{limit} tokens or more")
    thought, closing, answer = solution.partition("</think>")
    if closing and context.options["tags"] == "answer":
        solution = f"{thought}{closing}\n<answer>\n{answer.strip()}\n</answer>"
    truth = short_answer(row.get("expected_answer"))
    return Draft(question, truth, (solution,), extra={"pass_rate": str(pass_rate)})


def highest_pass_rates(
    keys: list[str], groups: list[str], options: dict[str, Any], split: str
) -> set[int]:
    """The `top` rows of the highest pass rates, in file order among equals; 500 are `eval`."""
    order = sorted(range(len(keys)), key=lambda i: -float(groups[i]))[: options["top"]]
    return _split_off(order, keys, options, split)


def hold_out_500(
    keys: list[str], groups: list[str], options: dict[str, Any], split: str
) -> set[int]:
    """All rows but 500 are `train`; those 500, chosen by the seed, are `eval`."""
    return _split_off(list(range(len(keys))), keys, options, split)


def _split_off(order: list[int], keys: list[str], options: dict[str, Any], split: str) -> set[int]:
    chosen = [keys[i] for i in order]
    shuffled = seeded_order(chosen, ["all"] * len(chosen), "all", options["seed"])
    held = {order[i] for i in shuffled[: options["held_out"]]}
    return held if split == "eval" else set(order) - held


OPEN_MATH: dict[str, DataSet] = {
    "competition_math": DataSet(
        "MATH in one file with its own columns (problem, level, type, solution), as in CS336",
        "qwedsacf/competition_math",
        {"train": ("data/train-*.parquet",), "eval": ("data/train-*.parquet",)},
        with_solution,
        "competition_math",
        local=("*competition_math*",),
        style="r1_zero",
        options={
            "held_out": Option(500, "rows of the split eval, which are not in train"),
            "seed": Option(42, "random seed of the rows held out"),
        },
        select_split=hold_out_500,
        note="it holds MATH's test split, and so MATH-500: do not report MATH after training on it",
    ),
    "omr12k": DataSet(
        "OpenMathReasoning: the 12,500 solutions of the highest pass rate, for SFT (CS336)",
        "nvidia/OpenMathReasoning",
        {"train": ("data/cot-*.parquet",), "eval": ("data/cot-*.parquet",)},
        open_math_reasoning,
        "omr12k",
        local=("*openmathreasoning*", "*omr*"),
        style="r1_zero",
        options={
            "max_tokens": Option(0, "keep shorter rows only, counted with tokenizer=MODEL; 0: all"),
            "top": Option(12500, "rows of the highest pass rate that are kept"),
            "tags": Option(
                "answer", "put the text after </think> between answer tags", ("answer", "none")
            ),
            "held_out": Option(500, "rows of the split eval, which are not in train"),
            "seed": Option(42, "random seed of the rows held out"),
        },
        group="pass_rate",
        select_split=highest_pass_rates,
    ),
}
