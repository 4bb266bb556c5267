"""Rows of each shape: what is read, what the run says about it, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, make_tokenizer
from jsonl import read_jsonl, write_jsonl
from refused import refused
from tables import tabled

from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError
from postgrad.problem import Problem

Row = dict[str, Any]
ASK = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}
CALL = {**YES, "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
HUMAN = {"from": "human", "value": "Why?"}
GPT = {"from": "gpt", "value": "Yes."}
MORE = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
LONG = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, ASK]
GSM8K = "It is <<1000+234=1234>>1,234.\n#### 1,234"


def load(folder: Path, *rows: Row, columns: str = "", lines: list[str] | None = None) -> Any:
    path = write_jsonl(folder / "rows.jsonl", *rows)
    return load_problems(f"{path}{columns}", None if lines is None else lines.append)


def refusal_of(folder: Path, *rows: Row) -> str:
    """Return the line that refuses the rows."""
    with refused("damaged", folder / "rows.jsonl") as caught:
        load(folder, *rows)
    message = str(caught.value).partition("rows.jsonl: ")[2]
    assert "\n" not in message and len(message) < 500
    return message


# row, ground truth, demonstrations, extra
ASKED: list[tuple[Row, str, tuple[str, ...], Row]] = [
    ({"prompt": "Why?"}, "", (), {}),
    ({"prompt": [ASK], "ground_truth": 2, "level": 3}, "2", (), {"level": 3}),
    ({"prompt": "Why?", "answer": 2.0, "label": 1}, "2", (), {"label": 1}),
    ({"prompt": "Why?", "answer": None}, "", (), {}),
    ({"question": "Why?", "answer": "\\frac12"}, "\\frac12", (), {}),
    ({"question": "Why?", "answer": GSM8K}, "1234", (GSM8K,), {}),
    ({"problem": "Why?", "expected_answer": "2", "solution": "s"}, "2", (), {"solution": "s"}),
    ({"query": "Why?", "final_answer": "2"}, "2", (), {}),
    ({"prompt": "Why?", "ground_truth": "2", "answer": "3"}, "2", (), {"answer": "3"}),
    ({"prompt": "Why?", "ground_truth": "2", "target": [YES, "3"]}, "2", ("Yes.", "3"), {}),
    ({"prompt": "Why?", "completion": "Yes."}, "", ("Yes.",), {}),
    ({"prompt": [ASK], "completion": [YES], "label": True}, "", ("Yes.",), {"label": True}),
    ({"question": "Why?", "answer": "2", "response": "Yes."}, "2", ("Yes.",), {}),
    ({"instruction": "Why?", "input": "", "output": "Yes."}, "", ("Yes.",), {}),
    ({"inputs": "Why?", "targets": "Yes."}, "", ("Yes.",), {}),
    ({"input": "Why?", "output": "Yes."}, "", ("Yes.",), {}),
    ({"messages": [ASK], "ground_truth": "4"}, "4", (), {}),
    ({"messages": [ASK, YES], "topic": "x"}, "", ("Yes.",), {"topic": "x"}),
    ({"conversations": [HUMAN, GPT]}, "", ("Yes.",), {}),
    ({"conversation": [{**ASK, "toxic": False}, YES]}, "", ("Yes.",), {}),
    (
        {"problem": "Why?", "answer": "2", "messages": [ASK, YES]},
        "2",
        ("Yes.",),
        {"problem": "Why?"},
    ),
    ({"prompt": [ASK], "chosen": "a", "rejected": "b"}, "", (), {"chosen": "a", "rejected": "b"}),
]


@pytest.mark.parametrize(("row", "truth", "demonstrations", "extra"), ASKED)
def test_columns_become_the_fields_of_a_problem(
    tmp_path: Path, row: Row, truth: str, demonstrations: tuple[str, ...], extra: Row
) -> None:
    (problem,) = load(tmp_path, row)
    assert [(m["role"], m["content"]) for m in problem.messages] == [("user", "Why?")]
    assert (problem.ground_truth, problem.demonstrations) == (truth, demonstrations)
    assert problem.extra == extra and problem.row == row
    with_system = load(tmp_path, row | {"system_prompt": "Be brief."})[0]
    assert with_system.messages[0] == SYSTEM and with_system.extra == extra


CHOICE = {"question": "Which?", "answer": "B"}
SENTENCE = "Question: Which?\nA. aa\nB. bb\nC. cc\nD. dd\nAnswer:"
FOUR = ["aa", "bb", "cc", "dd"]
CHOICES: list[tuple[Row, str, str]] = [
    ({**CHOICE, **dict(zip("ABCD", FOUR, strict=True))}, SENTENCE, "mmlu"),
    ({**CHOICE, **{f"option_{text[0]}": text for text in FOUR}}, SENTENCE, "mmlu"),
    ({**CHOICE, "choices": FOUR, "answer": 1}, SENTENCE, "mmlu"),
    ({**CHOICE, "options": FOUR, "answer_index": 1}, SENTENCE, "mmlu_pro"),
    ({**CHOICE, "options": {"A": "aa", "B": "bb"}, "answer": "bb"}, "B. bb\n", "mmlu_pro"),
]


@pytest.mark.parametrize(("row", "shown", "data_source"), CHOICES)
def test_a_prompt_holds_its_options(tmp_path: Path, row: Row, shown: str, data_source: str) -> None:
    (problem,) = load(tmp_path, row)
    assert shown in problem.messages[-1]["content"]
    assert (problem.ground_truth, problem.data_source) == ("B", data_source)


REPLIES = {"chosen": "Yes.", "rejected": "No."}
# row, messages of the prompt; the replies are Yes. and No.
PAIRS: list[tuple[Row, list[Row]]] = [
    ({"prompt": "Why?", **REPLIES}, [ASK]),
    ({"prompt": "Why?", "chosen": YES, "rejected": [NO]}, [ASK]),
    ({"question": "Why?", "chosen": [ASK, YES], "rejected": [NO], "messages": [ASK]}, [ASK]),
    ({"chosen": [HUMAN, GPT], "rejected": [HUMAN, {**GPT, "value": "No."}]}, [ASK]),
    ({"chosen": [*LONG, YES], "rejected": [*LONG, NO]}, LONG),
    ({"prompt": LONG, "chosen": [*LONG, YES], "rejected": "No."}, LONG),
    ({"prompt": "Why?", "system": "Be brief.", **REPLIES}, [SYSTEM, ASK]),
    ({"system": "Be brief.", "chosen": [ASK, YES], "rejected": [ASK, NO]}, [SYSTEM, ASK]),
    ({"instruction": "Why?", "input": "Now.", **REPLIES}, [{**ASK, "content": "Why?\n\nNow."}]),
]


@pytest.mark.parametrize(("row", "messages"), PAIRS)
def test_both_replies_of_a_pair_have_one_prompt(
    tmp_path: Path, row: Row, messages: list[Row]
) -> None:
    (problem,) = load(tmp_path, row)
    assert list(problem.messages) == messages
    prompts = Encoder(make_tokenizer(CHATML))
    written = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    prompt = "".join(written) + "<|im_start|>assistant\n"
    assert prompts.decode_raw(prompts.prompt(problem)) == prompt
    for name, reply in REPLIES.items():
        assert problem.extra[name] == reply
        assert prompts.decode_raw(prompts.reply(problem, reply)) == f"{reply}<|im_end|>"
        row = prompts.scored_row(problem, reply)
        assert prompts.decode_raw(row.prompt) == prompt
        assert prompts.decode_raw(row.response).startswith(f"{reply}<|im_end|>")


REFUSED = read_jsonl(Path(__file__).with_name("refused_rows.jsonl"))


@pytest.mark.parametrize("case", REFUSED, ids=[str(case["says"]) for case in REFUSED])
def test_refused_rows(tmp_path: Path, case: Row) -> None:
    """One row, or several of which the last is wrong; each part of `says` is in the line."""
    rows, says = (one if isinstance(one, list) else [one] for one in case.values())
    message = refusal_of(tmp_path, *rows)
    assert all(part in message for part in says), message


@tabled("row, name")
def test_a_column_that_the_model_should_see_is_not_lost(
    tmp_path: Path, row: Row, name: str
) -> None:
    """Wherever such a column is filled; an empty one is no reason to stop."""
    message = refusal_of(tmp_path, row, {**row, name: None}, {**row, name: ["x"]})
    assert message.startswith("line 3: ") and f"FILE:{name}=unused" in message
    assert ("FILE:image_1=images" if name == "image_1" else f"unread_column: {name} ") in message
    rows = ({**row, name: ["x"]}, {**row, name: []})
    assert all(
        name not in problem.extra for problem in load(tmp_path, *rows, columns=f":{name}=unused")
    )


def test_a_run_says_which_columns_are_read(tmp_path: Path) -> None:
    lines: list[str] = []
    rows = [{"question": "Why?", "answer": "2"}, {"question": "a", "answer": "b", "level": 3}]
    load(tmp_path, *rows, lines=lines)
    read = "problem rows: reads question as prompt, answer as ground_truth"
    read += "; not shown to the model: level"
    assert lines == [f"{tmp_path / 'rows.jsonl'}: {read}"]
    write_jsonl(tmp_path / "more.jsonl", rows[1])
    load_problems(f"{tmp_path},arithmetic:1", lines.append)
    assert lines[1:] == [f"{tmp_path}: {read}"], "alike files of a folder share a line"


def test_the_first_row_decides_the_shape(tmp_path: Path) -> None:
    rows = [{"prompt": "Why?", "answer": "1"}, {"question": "How?", "answer": "2", "output": "3"}]
    first, second = load(tmp_path, *rows)
    assert (first.ground_truth, second.ground_truth, second.demonstrations) == ("1", "2", ())
    assert second.messages[0]["content"] == "How?" and second.extra == {"output": "3"}
    assert "line 2: no column completion or response" in refusal_of(tmp_path, *rows[::-1])


def test_messages_keep_what_is_trained_on(tmp_path: Path) -> None:
    muted = [ASK, {**YES, "loss": False}, MORE[0], {**MORE[1], "loss": True, "info": {"a": 1}}]
    conversation = load(tmp_path, {"messages": muted})[0].conversation
    assert [m.get("weight") for m in conversation.messages] == [None, 0, None, None]
    row = {"prompt": "Why?", "verification_info": '{"ground_truth": "4"}'}
    columns = ":verification_info.ground_truth=ground_truth"
    assert load(tmp_path, row, columns=columns)[0].ground_truth == "4"


LOADERS = """
from postgrad.problem import Problem

def load():
    yield {"question": "Why?", "answer": "2"}
    yield {"question": "How?", "answer": "3", "uid": "mine"}

def problems():
    return [Problem("own", ({"role": "user", "content": "Why?"},), "2")]

def broken():
    yield {"question": "Why?"}
    raise KeyError("x")

def texts():
    return ["Why?"]

def nothing():
    return []
"""


def test_a_function_of_the_user_loads_rows_or_problems(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LOADERS)
    lines: list[str] = []
    first, second = load_problems(f"{file}:load", lines.append)
    assert (first.ground_truth, first.data_source, second.uid) == ("2", "mine", "mine")
    assert first.read_from.endswith("mine.py:load: row 1") and "question as prompt" in lines[0]
    assert load_problems(f"{file}:problems") == [Problem("own", (ASK,), "2")]
    assert load_problems(f"{file}:load:question=prompt:answer=unused")[0].ground_truth == ""
    refusals = {"broken": "KeyError: 'x' (mine.py, line 13)", "texts": "row 1 is str"}
    for name, key in (refusals | {"nothing": "no rows", "laod": "did you mean load?"}).items():
        with pytest.raises(ConfigError, match=f"mine.py.*{re.escape(key)}"):
            load_problems(f"{file}:{name}")
