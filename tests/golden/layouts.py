"""Rows in every documented layout: twenty hand-written problems, written in each layout's columns.

The texts vary by problem. What is optional in a layout (a system message, `extra_info`, a second
turn, the form of the answer) varies with the problem's number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SYSTEM = "Answer briefly."


@dataclass(frozen=True)
class Item:
    """One problem: what is asked, the worked solution, the answer, and wrong answers."""

    number: int
    question: str
    solution: str
    answer: str
    wrong: tuple[str, str, str]


TEXTS: list[tuple[str, str, str, str]] = [
    ("What is 17 + 25?", "17 + 25 = 42", "42", "32|43|52"),
    ("A pen costs $3. What do 4 pens cost?", "4 * 3 = <<4*3=12>>12", "12", "7|34|1"),
    ("Ann has 1,000 beads and buys 500 more. How many now?", "1000+500", "1,500", "500|1000|2000"),
    ("Solve $2x = 7$.", "Divide by 2: $x = \\frac{7}{2}$", "\\frac{7}{2}", "7|\\frac{2}{7}|14"),
    ("Simplify $\\sqrt{18}$.", "$18 = 9 \\cdot 2$", "3\\sqrt{2}", "9\\sqrt{2}|6|2\\sqrt{3}"),
    ("Is 91 prime? Answer yes or no.", "91 = 7 * 13", "no", "yes|maybe|both"),
    ("Which planet is the largest?", "Gas giants are the largest.", "Jupiter", "Mars|Earth|Venus"),
    (
        "Translate to English: Übung macht den Meister",
        "It is a proverb.",
        "Practice makes perfect",
        "a|b|c",
    ),
    ("Write 3/4 as a decimal.", "3 : 4 = 0.75", "0.75", "0.34|1.33|7.5"),
    ("Name the color of\n\n- snow\n- milk", "Both are\nwhite", "white", "red|blue|green"),
    ("What is -3 - 4?", "Go left.", "-7", "7|-1|1"),
    ("  How many legs do 3 spiders have?  ", "3 * 8 = 24", "24", "18|12|32"),
    ("What is 50% of 80?", "Half of 80", "40", "30|50|160"),
    ("Evaluate $\\int_0^1 x\\,dx$.", "$[x^2/2]_0^1$", "\\frac12", "1|0|2"),
    ("日本の首都は？", "東京です", "東京", "大阪|京都|名古屋"),
    (
        'Who said "I think"? <b>One</b> name.',
        "Descartes & his *cogito*",
        "Descartes",
        "Kant|Hume|Plato",
    ),
    ("Complete: 2, 4, 8, ...", "It doubles: {16}", "16", "10|12|14"),
    ("What is 1e3?", "10 ** 3", "1000", "13|100|30"),
    ("Which is larger: 9.11 or 9.9?", "0.90 > 0.11", "9.9", "9.11|equal|neither"),
    ("Emoji for the sun? ☀️ or 🌧️", "It shines.", "☀️", "🌧️|❄️|🌈"),
]
ITEMS = [
    Item(number, question, solution, answer, tuple(wrong.split("|")))  # type: ignore[arg-type]
    for number, (question, solution, answer, wrong) in enumerate(TEXTS)
]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def reply(text: str) -> Row:
    return {"role": "assistant", "content": text}


def system(item: Item, every: int = 2) -> list[Row]:
    """Return a system message for each second (or `every`-th) problem."""
    return [{"role": "system", "content": SYSTEM}] if item.number % every == 1 else []


def options(item: Item) -> tuple[list[str], int]:
    """Return the four options, and the index of the right one."""
    right = item.number % 4
    return [*item.wrong[:right], item.answer, *item.wrong[right:]], right


def verl(item: Item) -> Row:
    row: Row = {
        "data_source": ("openai/gsm8k", "math_dapo")[item.number % 2],
        "prompt": [*system(item, 3), user(item.question)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": item.answer},
    }
    if item.number % 4:
        row["extra_info"] = {"split": "train", "index": item.number, "answer": item.solution}
    return row


def luffy(item: Item) -> Row:
    target = [reply(f"<think>\n{item.solution}\n</think>\n{item.answer}")]
    return verl(item) | {"target": None if item.number % 5 == 4 else target}


def bupo(item: Item) -> Row:
    row = verl(item) | {"question": item.question, "final_answer": item.answer, "difficulty": 3.5}
    row["extra_info"] = {"index": item.number, "raw_problem": item.question, "split": None}
    return row


def classmate(item: Item) -> Row:
    row = verl(item) | {"data_source": "mmlu_sycophancy"}
    row["reward_model"] |= {"raw_question_for_monitor": item.question, "hint_str": item.wrong[0]}
    return row


def gsm8k(item: Item) -> Row:
    answer = item.answer if item.answer[-1].isdigit() else str(item.number)
    return {"question": item.question, "answer": f"{item.solution}\n#### {answer}"}


def cs336_math(item: Item) -> Row:
    row: Row = {"problem": item.question, "answer": item.answer}
    return row | (
        {"solution": f"{item.solution}, so $\\boxed{{{item.answer}}}$."} if item.number % 2 else {}
    )


def cs336_sft(item: Item) -> Row:
    return {"prompt": item.question, "response": f"{item.solution} {item.answer}"}


def cs336_mmlu(item: Item) -> Row:
    texts, right = options(item)
    lettered = dict(zip("ABCD", texts, strict=True))
    return {"question": item.question, **lettered, "answer": "ABCD"[right]}


def mmlu_hub(item: Item) -> Row:
    texts, right = options(item)
    return {"question": item.question, "subject": "law", "choices": texts, "answer": right}


def mmlu_pro(item: Item) -> Row:
    texts, right = options(item)
    return {
        "question": item.question,
        "options": texts,
        "answer": "ABCD"[right],
        "answer_index": right,
    }


def arc(item: Item) -> Row:
    texts, right = options(item)
    labels = "1234" if item.number % 2 else "ABCD"
    choices = {"text": texts, "label": list(labels)}
    return {
        "id": str(item.number),
        "question": item.question,
        "choices": choices,
        "answerKey": labels[right],
    }


def trl_text(item: Item) -> Row:
    return {"text": f"{item.question}\n{item.solution} {item.answer}"}


def trl_language_modeling(item: Item) -> Row:
    return {"messages": [*system(item), user(item.question), reply(item.answer)]}


def trl_prompt_only(item: Item) -> Row:
    return {
        "prompt": [user(item.question)] if item.number % 2 else item.question,
        "answer": item.answer,
    }


def trl_prompt_completion(item: Item) -> Row:
    if item.number % 2:
        return {"prompt": [user(item.question)], "completion": [reply(item.answer)]}
    return {"prompt": item.question, "completion": item.answer}


def trl_preference(item: Item) -> Row:
    if item.number % 2:
        chosen, rejected = [reply(item.answer)], [reply(item.wrong[0])]
        return {
            "prompt": [*system(item, 3), user(item.question)],
            "chosen": chosen,
            "rejected": rejected,
        }
    return {"prompt": item.question, "chosen": item.answer, "rejected": item.wrong[0]}


def trl_implicit_preference(item: Item) -> Row:
    prompt = [*system(item), user(item.question)]
    return {"chosen": [*prompt, reply(item.answer)], "rejected": [*prompt, reply(item.wrong[1])]}


def trl_unpaired_preference(item: Item) -> Row:
    good = item.number % 3 > 0
    return {
        "prompt": item.question,
        "completion": item.answer if good else item.wrong[2],
        "label": good,
    }


def chat(item: Item) -> Row:
    turns = [user(item.question), reply(item.solution)]
    if item.number % 3 == 2:
        turns += [user("And in one word?"), reply(item.answer)]
    return {"messages": [*system(item, 4), *turns]}


def sharegpt(item: Item) -> Row:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [
        {"from": names[one["role"]], "value": one["content"]} for one in chat(item)["messages"]
    ]
    return {"id": f"row_{item.number}", "conversations": turns}


def alpaca(item: Item) -> Row:
    row: Row = {"instruction": item.question, "input": "", "output": item.answer}
    if item.number % 3 == 1:
        row["input"] = f"Known: {item.solution}"
    return row | ({"system": SYSTEM} if item.number % 4 == 3 else {})


def question_answer(item: Item) -> Row:
    row: Row = {"question": item.question, "answer": item.answer}
    return row | ({"uid": f"mine-{item.number}"} if item.number < 10 else {"level": 3})


LAYOUTS: dict[str, Callable[[Item], Row]] = {
    layout.__name__: layout
    for layout in (
        verl,
        luffy,
        bupo,
        classmate,
        gsm8k,
        cs336_math,
        cs336_sft,
        cs336_mmlu,
        mmlu_hub,
        mmlu_pro,
        arc,
        trl_text,
        trl_language_modeling,
        trl_prompt_only,
        trl_prompt_completion,
        trl_preference,
        trl_implicit_preference,
        trl_unpaired_preference,
        chat,
        sharegpt,
        alpaca,
        question_answer,
    )
}
