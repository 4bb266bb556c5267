"""Pairs as public data sets write them: the prompt ends where the two replies start."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, make_tokenizer

from postgrad.data.problems import load_problems
from postgrad.data.render import Prompts
from postgrad.data.scored_rows import split_conversation
from postgrad.errors import ConfigError

Turns = list[tuple[str, str]]
USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}
HUMAN = {"from": "human", "value": "Why?"}
HH = "\n\nHuman: Why?\n\nAssistant:"
HH_LONG = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
ASKED: Turns = [("user", "Why?")]
LONG: Turns = [("user", "Hi"), ("assistant", "Hello"), *ASKED]
LONG_MESSAGES = [{"role": role, "content": content} for role, content in LONG]


def load(folder: Path, *rows: dict[str, Any]) -> list[Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(str(folder / "rows.jsonl"))


def shp(label: Any) -> dict[str, Any]:
    replies = ("Yes.", "No.") if label in (1, "1") else ("No.", "Yes.")
    return {"history": "Why?", "human_ref_A": replies[0], "human_ref_B": replies[1]} | {
        "labels": label
    }


PAIRS: dict[str, tuple[dict[str, Any], Turns]] = {
    "UltraFeedback": (
        {"prompt": "Why?", "chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, YES]},
        ASKED,
    ),
    "dialogues with a system message": (
        {"prompt": "Why? ", "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]},
        [("system", "Be brief."), *ASKED],
    ),
    "dialogues of several turns": (
        {"prompt": "Hi", "chosen": [*LONG_MESSAGES, YES], "rejected": [*LONG_MESSAGES, NO]},
        LONG,
    ),
    "messages as replies": ({"prompt": "Why?", "chosen": YES, "rejected": NO}, ASKED),
    "HH-RLHF": ({"chosen": f"{HH} Yes.", "rejected": f"{HH} No."}, ASKED),
    "HH-RLHF, several turns": ({"chosen": f"{HH_LONG} Yes.", "rejected": f"{HH_LONG} No."}, LONG),
    "HH-RLHF without line breaks": (
        {"chosen": f"{HH} Yes.".strip(), "rejected": f"{HH} No.".strip()},
        ASKED,
    ),
    "HH-RLHF with a prompt": ({"prompt": HH_LONG, "chosen": " Yes.", "rejected": " No."}, LONG),
    "HH-RLHF with the prompt twice": (
        {"prompt": HH, "chosen": f"{HH} Yes.", "rejected": f"{HH} No."},
        ASKED,
    ),
    "HH-RLHF from Windows": (
        {"chosen": f"{HH} Yes.".replace("\n", "\r\n"), "rejected": f"{HH} No."},
        ASKED,
    ),
    "one dialogue and one reply": (
        {"prompt": "Why?", "chosen": [USER, YES], "rejected": [NO]},
        ASKED,
    ),
    "SHP, A": (shp(1), ASKED),
    "SHP, B": (shp(0), ASKED),
    "SHP as text": (shp("1"), ASKED),
    "LLaMA-Factory, ShareGPT": (
        {
            "system": "Be brief.",
            "conversations": [HUMAN],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        [("system", "Be brief."), *ASKED],
    ),
    "LLaMA-Factory, Alpaca": (
        {
            "instruction": "Why?",
            "input": "",
            "chosen": "Yes.",
            "rejected": "No.",
            "history": [["Hi", "Hello"]],
        },
        LONG,
    ),
    "messages with replies": (
        {"messages": LONG_MESSAGES, "chosen": [YES], "rejected": [NO]},
        LONG,
    ),
    "ShareGPT dialogues": (
        {
            "chosen": [HUMAN, {"from": "gpt", "value": "Yes."}],
            "rejected": [HUMAN, {"from": "gpt", "value": "No."}],
        },
        ASKED,
    ),
}


@pytest.mark.parametrize(("row", "turns"), PAIRS.values(), ids=PAIRS)
def test_the_prompt_is_split_off(tmp_path: Path, row: dict[str, Any], turns: Turns):
    (problem,) = load(tmp_path, row)
    assert [(m["role"], m["content"]) for m in problem.messages] == turns
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Yes.", "No.")


@pytest.mark.parametrize(("row", "turns"), PAIRS.values(), ids=PAIRS)
def test_tokens_of_dpo_and_of_a_reward_model(tmp_path: Path, row: dict[str, Any], turns: Turns):
    """Both replies have one prompt, and only the reply with its end of turn follows it."""
    (problem,) = load(tmp_path, row)
    prompts = Prompts(make_tokenizer(CHATML))
    written = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
    prompt = "".join(written) + "<|im_start|>assistant\n"
    assert prompts.decode_raw(prompts.encode(problem)) == prompt
    for name, reply in (("chosen", "Yes."), ("rejected", "No.")):
        text = problem.extra[name]
        assert prompts.decode_raw(prompts.encode_reply(problem, text)) == f"{reply}<|im_end|>"
        before, after = split_conversation(prompts, problem, text)
        assert prompts.decode_raw(before) == prompt
        assert prompts.decode_raw(after).startswith(f"{reply}<|im_end|>")


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (shp(2), "labels is 2"),
        ({"conversations": [HUMAN, YES], "chosen": YES, "rejected": NO}, "conversations ends in"),
        ({"prompt": "Why?", "chosen": YES | {"weight": 0}, "rejected": NO}, "chosen has weight 0"),
        ({"prompt": "Why?", "chosen": [USER], "rejected": [USER]}, "chosen must end in"),
        (
            {"prompt": "Why?", "chosen": [USER, YES], "rejected": [SYSTEM, USER, NO]},
            "the same messages",
        ),
        ({"prompt": "Other", "chosen": [USER, YES], "rejected": [USER, NO]}, "prompt=unused"),
        ({"chosen": f"{HH} Yes.", "rejected": f"{HH}"}, "rejected has an empty turn"),
        ({"chosen": f"{HH} Yes.", "rejected": f"{HH_LONG} No."}, "differ before the last reply"),
        ({"chosen": [USER, YES], "rejected": [USER, NO | {"content": " "}]}, "rejected is empty"),
        ({"prompt": "Why?", "chosen": YES | {"content": ""}, "rejected": NO}, "chosen is empty"),
        (
            {"messages": LONG_MESSAGES, "chosen": [USER, YES], "rejected": [USER, NO]},
            "messages and chosen hold different messages",
        ),
        ({"question": "Who?", "chosen": [USER, YES], "rejected": [USER, NO]}, "question=unused"),
        (
            {"prompt": "Why?", "chosen": "Yes.", "rejected": "No.", "history": [["a", "b"]]},
            "history has turns",
        ),
        ({"query": "Why?", "response": "Yes.", "history": [["a", "b"]]}, "history has turns"),
        ({"instruction": "Why?", "output": "Yes.", "history": [["a", ""]]}, "is empty"),
    ],
)
def test_refused_pairs(tmp_path: Path, row: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=key) as caught:
        load(tmp_path, row)
    assert "\n" not in str(caught.value) and "line 1" in str(caught.value)


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_a_reply_may_be_a_dialogue(tmp_path: Path, column: str):
    """The prompt stays if the replies that it asks for start with "Human:"."""
    replies = {"chosen": "Human: Hi\n\nAssistant: Hello!", "rejected": "Human: a primate"}
    (problem,) = load(tmp_path, {column: "Write a dialogue."} | replies)
    assert problem.messages == ({"role": "user", "content": "Write a dialogue."},)
    assert {name: problem.extra[name] for name in replies} == replies


def test_a_reply_to_a_transcript_may_go_on_as_one(tmp_path: Path):
    long = " No.\n\nHuman: Why not?"
    (problem,) = load(tmp_path, {"prompt": HH, "chosen": " Yes.", "rejected": long})
    assert problem.messages == ({"role": "user", "content": "Why?"},)
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Yes.", long.strip())


def test_history_may_be_json_and_labels_may_be_texts(tmp_path: Path):
    row = {"instruction": "Why?", "chosen": "Yes.", "rejected": "No.", "history": '[["a", "b"]]'}
    assert len(load(tmp_path, row)[0].messages) == 3
    assert len(load(tmp_path, row | {"history": "[]"})[0].messages) == 1
    for label in (True, 1.0, "true"):
        (problem,) = load(tmp_path, shp(1) | {"labels": label})
        assert problem.extra["chosen"] == "Yes."


def test_a_target_without_a_role_may_have_a_weight(tmp_path: Path):
    (problem,) = load(tmp_path, {"prompt": "Why?", "target": [{"content": "Yes.", "weight": 1}]})
    assert problem.demonstrations == ("Yes.",)


def test_every_row_has_a_transcript_as_its_prompt(tmp_path: Path):
    row = {"prompt": HH, "chosen": "Yes.", "rejected": "No."}
    with pytest.raises(ConfigError, match="line 2: prompt is no transcript"):
        load(tmp_path, row, row | {"prompt": "Why?"})


def test_preference_files_of_openai_by_renaming(tmp_path: Path):
    row = {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    columns = "input.messages=prompt:preferred_output=chosen:non_preferred_output=rejected"
    (problem,) = load_problems(f"{tmp_path / 'rows.jsonl'}:{columns}")
    assert problem.messages == (USER,)
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Yes.", "No.")
