"""Texts of a row that would be lost, or are not there: one line, and never silence."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_public_layouts import ASK, YES, load, trained, turns

from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError

Row = dict[str, Any]
THOUGHT = "First I look at the question."

REFUSED: list[tuple[Row, str]] = [
    ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "empty reply"),
    ({"messages": [ASK, {"role": "assistant", "content": ""}, ASK, YES]}, "message 2 of 4"),
    ({"messages": [{"role": "user", "content": ""}, YES]}, "prompt is empty"),
    ({"prompt": [{"role": "user", "content": ""}], "chosen": "a", "rejected": "b"}, "is empty"),
    ({"input": "-", "output": "<think>a</think> b"}, "placeholder"),  # OpenCodeReasoning
    ({"code": "def f(x): return x", "input": "1", "output": "1"}, "FILE:code=unused"),  # CRUXEval
    ({"question": "Why?", "answer": "Long. 4", "reference_answer": "4"}, "FILE:answer=response"),
    ({"problem": "Why?", "answer": "Long. 4", "ground_truth": 4}, "FILE:problem=prompt:answer"),
    ({"prompt": "Why?", "ground_truth": "  "}, "no ground truth"),
    ({"question": "Why?", "answer": "a", "decoded_image": "b"}, "FILE:decoded_image=unused"),
    ({"question": "Why?", "answer": "a", "image_1": "b"}, "text only"),
    ({"question": "Why?", "answer": "a", "video_path": "b"}, "text only"),
    ({"prompt": str([ASK]), "ground_truth": "4"}, "as Python prints it"),
    ({"messages": "[{'content': 'Why?', 'role': 'user'}\n {'content': 'Yes.'}]"}, "Python"),
    ({"messages": [ASK, YES], "metadata": '{"tools": [{"name": "f"}]}'}, "FILE:metadata.tools"),
    ({"Prompt": "Why?", "Answer": "4"}, r"FILE:Prompt=prompt:Answer=answer\)"),  # FRAMES
    ({"prompt": "Why?", "Answer": "4"}, r"FILE:Answer=answer\)"),
    ({"messages": [ASK, {**YES, "role": "gpt"}]}, "no role of a chat"),
    ({"question": "Why?", "answer": "a", "Picture": "b"}, "text only"),
    ({"trajectory": [ASK, YES], "id": 1}, "FILE:trajectory=messages"),
    ({"trajectory": [ASK], "chosen": "a", "rejected": "b"}, "FILE:trajectory=messages"),
    ({"dialog": [ASK], "id": 1}, "FILE:dialog=prompt"),
    ({"problem": "Why?", "ground_truth": "4"}, "FILE:problem=prompt"),
    ({"prompt": '["a", "b"]', "response_a": '["c", "d"]', "response_b": '["e", "f"]',
      "winner_model_a": 1, "winner_model_b": 0}, "several turns"),
    ({"prompt": '["a"]', "response_a": "[null]", "response_b": '["e"]',
      "winner_model_a": 1, "winner_model_b": 0}, "chosen must be a string"),
    ({"prompt": '["a"]', "response_a": '["c"]', "response_b": '["e"]',
      "winner_model_a": 0, "winner_model_b": 0}, "neither"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "key"), REFUSED)
def test_refused(tmp_path: Path, row: Row, key: str):
    with pytest.raises(ConfigError, match=key) as caught:
        load(tmp_path, row)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


ACCEPTED: list[Row] = [
    {"messages": [ASK, YES], "reasoning": "on"},  # Nemotron
    {"prompt": "Why?", "response": f"<think>{THOUGHT}</think>Yes.", "reasoning": THOUGHT},
    {"prompt": "Why?", "chosen": "Yes.", "rejected": "No.", "reasoning": THOUGHT},  # a judge's
    {"messages": [ASK, {**YES, "content": "", "reasoning_content": THOUGHT}]},
    {"messages": [ASK, {"role": "assistant", "content": "", "weight": 0}, ASK, YES]},
    {"prompt": [{"role": "user", "content": ""}], "ground_truth": "1"},  # of an environment
    {"input": "Write f.", "output": "def f(): ...", "code": "def f(): ..."},
    {"question": "Why?", "answer": 4, "final_answer": "4"},
    {"question": "Why?", "answer": "4", "image": "", "image_preview": None},
    {"messages": [{**ASK, "header": {"accept": "en"}}, {**YES, "usage": {"total": 3}}]},  # WildChat
]


@pytest.mark.parametrize("row", ACCEPTED)
def test_accepted(tmp_path: Path, row: Row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert len(load_problems(str(path))) == 1


def test_the_answer_beside_an_output_is_the_truth(tmp_path: Path):
    (problem,) = load(tmp_path, {"instruction": "Why?", "output": "Long. 4", "answer": "4"})
    assert (problem.ground_truth, trained(problem)[-1]) == ("4", ("assistant", "Long. 4"))


def test_a_truth_that_is_nan_is_none(tmp_path: Path):
    """As the document of data says; pandas writes NaN for an empty cell."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "ground_truth": NaN}\n{"prompt": "b", "ground_truth": 1.0}\n')
    assert [problem.ground_truth for problem in load_problems(str(path))] == ["", "1"]


def test_the_solution_of_open_math_reasoning(tmp_path: Path):
    """The thought keeps its first tag, which a chat template does not write; n/a is none."""
    row = {"problem": "Why?", "expected_answer": "4", "generated_solution": "<think>a</think>4"}
    (problem, other) = load(tmp_path, row, {**row, "problem": "b", "generated_solution": "n/a"})
    assert problem.demonstrations == ("<think>a</think>4",)
    assert (other.demonstrations, other.ground_truth) == ((), "4")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": '["Why?"]', "response_a": '["No."]', "response_b": '["Yes."]',
         "winner_model_a": 0, "winner_model_b": 1},
        {"prompt": "Why?", "response_a": "Yes.", "response_b": "No.", "winner": "model_a"},
    ],
)  # fmt: skip
def test_replies_of_the_arena(tmp_path: Path, row: Row):
    (problem,) = load(tmp_path, row)
    assert turns(problem.messages) == [("user", "Why?")]
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Yes.", "No.")


RENAMED: list[tuple[Row, str]] = [
    (
        {**dict(zip(("opa", "opb", "opc", "opd"), "wxyz", strict=True)), "question": "Q", "cop": 1},
        "B",
    ),
    ({"question": "Q", "long_answer": "l", "final_decision": "yes", "context": None}, "yes"),
    ({"responses_create_params": {"input": [ASK]}, "expected_answer": "4"}, "4"),
    ({"problem": "Q", "ground_truth": "4"}, "4"),
    ({"context": "C c", "question": "Q", "answers": {"text": ["4", "5"]}}, "4"),
]


@pytest.mark.parametrize(("row", "truth"), RENAMED)
def test_the_renaming_of_a_hint_is_read(tmp_path: Path, row: Row, truth: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, row)
    columns = str(caught.value).partition("FILE")[2].rstrip(")")
    (problem,) = load(tmp_path, row, columns=columns)
    assert problem.ground_truth == truth
