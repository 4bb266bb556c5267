"""Rows in the columns of public data sets: what is read of them, or the line that refuses them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from postgrad.data.conversation_rows import conversation_of
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError
from postgrad.problem import Problem

Row = dict[str, Any]
ASK = {"role": "user", "content": "Why?"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}
MORE = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]


def load(folder: Path, *rows: Row, columns: str = "") -> list[Problem]:
    """The problems of a jsonl file, which are those of a parquet file with the same rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_problems(f"{path}{columns}")
    table = pa.Table.from_pylist(list(rows))
    parquet.write_table(table, folder / "rows.parquet")
    assert load_problems(f"{folder / 'rows.parquet'}{columns}") == problems
    return problems


def turns(messages: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def trained(problem: Problem) -> list[tuple[str, str]]:
    """The conversation that SFT trains on."""
    conversation = conversation_of(problem)
    assert conversation is not None
    return turns(conversation.messages)


ONE_TURN = [("user", "Why?"), ("assistant", "Yes.")]
TWO_TURNS = [*ONE_TURN, ("user", "So?"), ("assistant", "So.")]


def verdict(prompt: Row, names: tuple[str, str], better: Row, worse: Row) -> list[tuple[Row, str]]:
    """Two rows: the first reply is the better one, then the second."""
    replies = {names[0]: "Yes.", names[1]: "No."}
    swapped = {names[0]: "No.", names[1]: "Yes."}
    return [({**prompt, **replies, **better}, "Why?"), ({**prompt, **swapped, **worse}, "Why?")]


COMPARED = [
    *verdict(
        {"prompt": "Why?"},
        ("response_1", "response_2"),
        {"preference_strength": -2},
        {"preference_strength": 1},
    ),
    *verdict(
        {"context": [ASK]},
        ("response1", "response2"),
        {"overall_preference": -3},
        {"overall_preference": 2},
    ),
    *verdict(
        {"prompt": "Why?", "safer_response_id": 1},
        ("response_0", "response_1"),
        {"better_response_id": 0},
        {"better_response_id": 1},
    ),
    *verdict(
        {"question": {"dataset": "eli5", "full_text": "Why?"}},
        ("answer_0", "answer_1"),
        {"score_0": 0.5, "score_1": -0.5},
        {"score_0": -0.25, "score_1": 0.25},
    ),
    ({"conversation_a": [ASK, NO], "conversation_b": [ASK, YES], "winner": "model_b"}, "Why?"),
    ({"question": "Why?", "response_j": "Yes.", "response_k": "No."}, "Why?"),
    ({"instruction": "Why?", "chosen_response": "Yes.", "rejected_response": "No."}, "Why?"),
    ({"messages": [ASK], "chosen_response": YES, "rejected_response": NO}, "Why?"),
    ({"messages": [ASK, YES], "rejected_response": "No."}, "Why?"),
    ({"messages": [ASK, YES], "rejected_messages": [ASK, NO]}, "Why?"),
    ({"messages": [ASK, YES], "rejected_messages": json.dumps([ASK, NO])}, "Why?"),
    ({"query": "Why?", "response": "Yes.", "rejected_response": "No."}, "Why?"),
    ({"prompt": "Why?", "chosen": ["Yes."], "rejected": ["No."]}, "Why?"),
]


@pytest.mark.parametrize(("row", "question"), COMPARED)
def test_the_better_reply_is_chosen(tmp_path: Path, row: Row, question: str):
    (problem,) = load(tmp_path, row)
    assert turns(problem.messages) == [("user", question)]
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Yes.", "No.")


CONVERSATIONS: list[tuple[Row, list[tuple[str, str]]]] = [
    ({"conversations": ["Why?", "Yes.", "So?", "So."]}, TWO_TURNS),  # LIMA
    ({"conversation": [{"input": "Why?", "output": "Yes."}]}, ONE_TURN),  # Capybara
    ({"conversation": [{**ASK, "toxic": False, "turn": 1}, {**YES, "toxic": False}]}, ONE_TURN),
    ({"messages": [ASK, {**YES, "info": {"source": "a"}}]}, ONE_TURN),
    ({"inputs": "Why?", "targets": "Yes."}, ONE_TURN),  # Aya
    (  # Magpie: all turns, not the first alone
        {"instruction": "Why?", "response": "Yes.", "conversations": [ASK, YES, *MORE]},
        TWO_TURNS,
    ),
    (  # OpenR1-Math: the messages, not the short solution
        {"problem": "Why?", "solution": "Short.", "answer": "Yes", "messages": [ASK, YES]},
        ONE_TURN,
    ),
    ({"problem": "Why?", "solution": "A proof.", "messages": [ASK, YES]}, ONE_TURN),  # NuminaMath
    ({"question": "Why?", "solution": "Yes.", "answer": "1"}, ONE_TURN),  # LIMO
]


def test_answer_of_the_first_turn_keeps_its_question(tmp_path: Path) -> None:
    row = {"problem": "Why?", "answer": "Yes", "messages": [ASK, YES, *MORE]}
    (problem,) = load(tmp_path, row)
    assert (turns(problem.messages), problem.ground_truth) == ([("user", "Why?")], "Yes")
    assert trained(problem) == TWO_TURNS


@pytest.mark.parametrize(("row", "expected"), CONVERSATIONS)
def test_what_sft_trains_on(tmp_path: Path, row: Row, expected: list[tuple[str, str]]):
    (problem,) = load(tmp_path, row)
    assert trained(problem) == expected


def test_ms_swifts_loss_of_a_message(tmp_path: Path):
    rows = [ASK, {**YES, "loss": False}, MORE[0], {**MORE[1], "loss": True}]
    (problem,) = load(tmp_path, {"messages": rows})
    assert problem.conversation is not None
    assert [m.get("weight") for m in problem.conversation.messages] == [None, 0, None, None]
    with pytest.raises(ConfigError, match="loss"):
        load(tmp_path, {"messages": [ASK, {**YES, "loss": 0.5}]})


def test_the_answers_of_xlam_are_tool_calls(tmp_path: Path):
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    tool = {"name": "weather", "description": "Weather.", "parameters": {"city": {"type": "str"}}}
    row = {"query": "Why?", "answers": json.dumps([call]), "tools": json.dumps([tool])}
    (problem,) = load(tmp_path, row)
    conversation = conversation_of(problem)
    assert conversation is not None and conversation.tools == (tool,)
    assert conversation.messages[-1]["tool_calls"] == [{"type": "function", "function": call}]
    assert turns(problem.messages) == [("user", "Why?")]


CHOICE = {"question": "Which?", "answer": "B"}
PROMPTS: list[tuple[Row, str, str]] = [
    ({"messages": [ASK], "ground_truth": "4"}, "Why?", "4"),  # Tulu's RLVR sets
    ({"question": "Why?", "answer": "x", "passage": "It rained."}, "It rained.\n\nWhy?", "x"),
    ({"question": "Why?", "answer": 2, "body": "One plus one."}, "One plus one.\n\nWhy?", "2"),
    ({"problem": "Why?", "answer": "proof", "solution": "Yes."}, "Why?", ""),  # NuminaMath-1.5
    ({"problem": "Why?", "answer": "notfound", "solution": "Yes."}, "Why?", ""),
    (  # Skywork-OR1
        {"prompt": [ASK], "ability": "math", "reward_model": {"ground_truth": '["4"]'}},
        "Why?",
        "4",
    ),
    ({**CHOICE, **{f"option_{letter}": letter * 2 for letter in "abcd"}}, "B. bb\n", "B"),
    ({**CHOICE, "answer": "bb", "options": {"A": "aa", "B": "bb"}}, "B. bb\n", "B"),  # MedQA
    ({**CHOICE, "options": ["aa", "bb"], "article": "A text."}, "A text.\n\nWhich?", "B"),  # RACE
]


@pytest.mark.parametrize(("row", "shown", "truth"), PROMPTS)
def test_prompts_hold_what_the_answer_needs(tmp_path: Path, row: Row, shown: str, truth: str):
    (problem,) = load(tmp_path, row)
    assert shown in problem.messages[-1]["content"]
    assert problem.ground_truth == truth


REFUSED: list[tuple[Row, str]] = [
    ({"prompt": "Why?", "response_1": "a", "response_2": "b", "preference_strength": 0}, "neither"),
    ({"question": "q", "answer_0": "a", "answer_1": "b", "score_0": 0.0, "score_1": 0.0}, "neithe"),
    ({"conversation_a": [ASK, NO], "conversation_b": [ASK, YES], "winner": "tie"}, "neither"),
    ({"prompt": "Q", "response_0": "a", "response_1": "b", "better_response_id": 2}, "known"),
    ({"prompt": "Why?", "chosen": ["Yes."], "rejected": ["No.", "Never."]}, "2 replies"),
    ({"messages": [ASK, YES, *MORE[:1]], "rejected_response": "No."}, "must end"),
    ({"prompt": "Make a task.", "instruction": "Why?", "response": "Yes."}, "FILE:prompt=unused"),
    ({"question": "Which?", "answer": "B", "option1": "a", "option2": "b"}, "FILE:option1=unused"),
    ({"text": "Write f.", "code": "def f(): ...", "test_list": ["assert f()"]}, "data prepare"),
    ({"prompt_id": "a", "answers": ["a"], "prompt": "Why?"}, "rename them"),
    ({"instruction": "Q", "completions": [{"response": "a"}, {"response": "b"}]}, "2 replies"),
    ({"messages": [ASK, YES], "functions": [{"name": "f"}]}, "FILE:functions=tools"),
    ({"messages": [ASK, {**YES, "function_call": {"name": "f"}}]}, "tool_calls"),
    ({"Problem": "Why?", "Answer": "2"}, "lower case"),
    ({"instruction": "Q", "output_1": "a", "output_2": "b"}, "rename them"),
    ({"messages": [ASK]}, "FILE:messages=prompt"),
    ({"messages": [ASK, YES], "rejected_messages": [MORE[0], NO]}, "up to the last reply"),
]


@pytest.mark.parametrize(("row", "key"), REFUSED)
def test_refused_layouts(tmp_path: Path, row: Row, key: str):
    with pytest.raises(ConfigError, match=key) as caught:
        load(tmp_path, row)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_key_of_a_column_with_json_text(tmp_path: Path):
    row = {"prompt": "Why?", "verification_info": '{"ground_truth": "4"}'}
    columns = ":verification_info.ground_truth=ground_truth"
    assert load(tmp_path, row, columns=columns)[0].ground_truth == "4"


def message(name: str, parent: str | None, text: str, rank: Any = None, **more: Any) -> Row:
    role = "assistant" if name[-1] in "ab" else "prompter"
    ids = {"message_id": name, "parent_id": parent, "message_tree_id": name[0]}
    return {**ids, "role": role, "text": text, "rank": rank, "deleted": False, **more}


TREE = [
    message("1", None, "Why?"),
    message("1b", "1", "No.", 2),
    message("1a", "1", "Yes.", 0),
    message("1bb", "1b", "Spam.", 1, role="prompter", deleted=True),
    message("1bba", "1bb", "Reply to spam.", 0),
    message("1-", "1a", "So?"),
    message("1-a", "1-", "So."),
]


def nested(name: str) -> Row:
    """The message with its replies inside, as in OpenAssistant's exports of trees."""
    (node,) = (one for one in TREE if one["message_id"] == name)
    replies = [nested(one["message_id"]) for one in TREE if one["parent_id"] == name]
    return {key: value for key, value in node.items() if key != "parent_id"} | {"replies": replies}


@pytest.mark.parametrize("rows", [TREE, [{"message_tree_id": "1", "prompt": nested("1")}]])
def test_message_trees(tmp_path: Path, rows: list[Row]):
    """Each user message is a row with its best reply; the worst one is rejected."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_problems(str(path))
    assert (trained(first), trained(second)) == (ONE_TURN, TWO_TURNS)
    assert (first.extra["chosen"], first.extra["rejected"]) == ("Yes.", "No.")
    assert "chosen" not in second.extra
    conversation = conversation_of(second)
    assert conversation is not None and conversation.num_prompt == 3  # trained on once


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        (TREE[1:], "1 before it is not"),
        (TREE * 2, "twice"),
        (TREE[:1], "no replies"),
        ([*TREE[:2], message("1a", "1", "Yes.", "best")], "rank"),
    ],
)
def test_broken_message_trees(tmp_path: Path, rows: list[Row], key: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=key):
        load_problems(str(path))
