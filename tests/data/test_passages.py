"""Passages and options of a question are in the prompt, or their row is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_public_layouts import load, turns

from postgrad.errors import ConfigError

ASKED = {"question": "Who?", "answer": "Ann"}
HOTPOT = {"title": ["One", "Two"], "sentences": [["Ann ran.", " She won."], ["Bob."]]}
TITLED = "One\nAnn ran. She won.\n\nTwo\nBob.\n\nWho?"

PASSAGES: list[tuple[dict[str, Any], str]] = [
    ({"context": HOTPOT}, TITLED),  # HotpotQA
    ({"context": json.dumps(list(zip(*HOTPOT.values(), strict=True)))}, TITLED),  # 2Wiki
    (  # MuSiQue
        {"paragraphs": [{"idx": 0, "title": "One", "paragraph_text": "Ann ran.", "is": True}]},
        "One\nAnn ran.\n\nWho?",
    ),
    ({"context": {"contexts": ["a b", "c d"], "labels": ["X", "Y"]}}, "a b\n\nc d\n\nWho?"),
    ({"context": ["a b", "c d"]}, "a b\n\nc d\n\nWho?"),
    ({"ctxs": [{"title": "One", "text": "a b"}]}, "One\na b\n\nWho?"),
    ({"story": "Ann ran.", "table": "| a |"}, "Ann ran.\n\n| a |\n\nWho?"),
    ({"Body": "Ann ran."}, "Ann ran.\n\nWho?"),  # SVAMP
    ({"document": "doc-17.pdf"}, "Who?"),
    ({"context": '["Ann ran"] is code.'}, '["Ann ran"] is code.\n\nWho?'),
    ({"context": {}, "passages": []}, "Who?"),
]


@pytest.mark.parametrize(("columns", "prompt"), PASSAGES)
def test_passages_are_in_the_prompt(tmp_path: Path, columns: dict[str, Any], prompt: str):
    if columns == {"context": {}, "passages": []}:  # parquet has no objects without fields
        columns = {"context": None, "passages": []}
    (problem,) = load(tmp_path, ASKED | columns)
    assert turns(problem.messages) == [("user", prompt)]
    (problem,) = load(tmp_path, {"question": "Who?", "response": "Ann.", **columns})
    assert turns(problem.messages) == [("user", prompt)]
    pair = {"question": "Who?", "chosen": "Ann.", "rejected": "Bob.", **columns}
    assert turns(load(tmp_path, pair)[0].messages) == [("user", prompt)]


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"table": [["a", "b"], ["1", "2"]]}, "FILE:table=unused"),  # FinQA
        ({"table": {"header": ["a"], "rows": [["1"]]}}, "table is an object"),
        ({"context": {"source": "web"}}, "context is an object"),
        ({"context": [{"role": "user", "content": "Hi."}]}, "context is a list"),
        ({"choice_A": "a", "choice_B": "b"}, "FILE:choice_A=unused"),  # LongBench v2
        ({"A": "a", "B": "b", "C": "c"}, "FILE:A=unused"),
        ({"distractor1": "a"}, "FILE:distractor1=unused"),
    ],
)
def test_what_would_not_be_in_the_prompt_is_refused(
    tmp_path: Path, columns: dict[str, Any], key: str
):
    with pytest.raises(ConfigError, match=key) as caught:
        load(tmp_path, ASKED | columns)
    assert "\n" not in str(caught.value)


FOUR = {letter: letter.lower() * 2 for letter in "ABCD"}
WORDS = ["aa", "bb", "cc"]
LETTERS = ["C", "B", "A"]
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({**FOUR, "E": "ee", "answer": "E"}, "E"),
    ({**{f"option_{k.lower()}": v for k, v in FOUR.items()}, "answer": 1}, "B"),  # MedMCQA
    ({"options": WORDS, "answer": "cc", "answer_letter": "C"}, "C"),  # SuperGPQA
    ({"options": LETTERS, "answer": "A", "answer_letter": "C"}, "C"),  # the text, not the letter
    ({"options": LETTERS, "answer": "A", "answer_index": 0}, "A"),
    ({"options": ["4", "5"], "answer": "5"}, "B"),
]


@pytest.mark.parametrize(("row", "letter"), ANSWERS)
def test_the_letter_of_the_answer(tmp_path: Path, row: dict[str, Any], letter: str):
    (problem,) = load(tmp_path, {"question": "Which?", **row})
    assert problem.ground_truth == letter
    assert "question about" not in problem.messages[-1]["content"]  # the file is no subject
    for option in ("E. ee", "C. A") if letter == "E" and "E" in row else ():
        assert (option in problem.messages[-1]["content"]) == (option == "E. ee")


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"options": LETTERS, "answer": "A"}, "is the letter of one option"),
        ({"options": WORDS, "answer": "bb", "answer_letter": "C"}, "different options"),
        ({"options": WORDS, "answer": "bb", "answer_idx": "Z"}, "answer_idx must be"),
    ],
)
def test_answers_that_name_two_options(tmp_path: Path, row: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, {"question": "Which?", **row})
