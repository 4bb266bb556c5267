"""Conversations in data files: several turns, tool calls, tool schemas, null contents."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from chat_templates import CHATML, GEMMA, QWEN25, make_tokenizer
from refused import refused

from postgrad.api.rows import as_problems
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.data.rows.messages import conversation_of
from postgrad.errors import ConfigError
from postgrad.problem import Conversation

USER = {"role": "user", "content": "Weather in Rome?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny"}
ANSWER = {"role": "assistant", "content": "It is sunny."}
THOUGHT = {**ANSWER, "reasoning_content": "Let me look."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}


def load(tmp_path: Path, row: dict[str, Any]) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return load_problems(str(path))[0]


def refusal_of(tmp_path: Path, row: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, row)
    return str(caught.value)


@pytest.mark.parametrize("column", ["completion", "response"])
def test_completion_keeps_all_its_messages(tmp_path: Path, column: str):
    problem = load(tmp_path, {"prompt": [USER], column: [CALLING, RESULT, ANSWER]})
    assert problem.messages == (USER,)
    assert problem.conversation == Conversation((USER, CALLING, RESULT, ANSWER), (), num_prompt=1)
    assert problem.demonstrations == (), "a demonstration is one text"


def test_completion_of_one_message_is_also_a_demonstration(tmp_path: Path):
    problem = load(tmp_path, {"prompt": [USER], "completion": [ANSWER]})
    assert problem.demonstrations == ("It is sunny.",)
    assert problem.conversation == Conversation((USER, ANSWER), (), num_prompt=1)


def test_chat_keeps_all_turns(tmp_path: Path):
    messages = [USER, ANSWER, USER, ANSWER]
    problem = load(tmp_path, {"messages": messages})
    assert problem.messages == tuple(messages[:-1])
    assert problem.demonstrations == ("It is sunny.",)
    assert problem.conversation == Conversation(tuple(messages), (), num_prompt=0)


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["objects", "text", "texts"]
)
def test_tools_column(tmp_path: Path, tools: Any):
    problem = load(tmp_path, {"messages": [USER, CALLING, RESULT, ANSWER], "tools": tools})
    assert problem.conversation.tools == (TOOL,)
    assert problem.extra == {}


def test_arguments_as_json_text_become_an_object(tmp_path: Path):
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome", "day": null}'}}
    calling = {"role": "assistant", "tool_calls": [call]}
    problem = load(tmp_path, {"messages": [USER, calling, RESULT, ANSWER]})
    message = problem.conversation.messages[1]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "day": None}


def test_null_fields_of_parquet_are_left_out(tmp_path: Path):
    """Parquet gives every message and every call the fields of all others."""
    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    messages = [USER, {**CALLING, "tool_calls": [CALL, other]}, RESULT, ANSWER]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
    problem = load_problems(str(path))[0]
    assert problem.conversation.messages == tuple(messages)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1]"),
        ({"messages": [USER, {**CALLING, "tool_calls": "x"}]}, "messages[1].tool_calls"),
        ({"messages": [USER, {**CALLING, "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        (
            {"messages": [USER, {**CALLING, "tool_calls": [{"name": "a", "arguments": "["}]}]},
            "messages[1].tool_calls[0].arguments",
        ),
        ({"messages": [USER, ANSWER], "tools": 3}, "tools"),
        ({"messages": [USER, ANSWER], "tools": ["["]}, "tools[0]"),
        ({"prompt": [USER], "completion": [ANSWER, USER]}, "completion"),
        ({"prompt": [USER], "completion": []}, "completion"),
        (
            {"prompt": [USER], "chosen": [CALLING, RESULT, ANSWER], "rejected": [ANSWER]},
            "chosen",
        ),
        ({"prompt": [USER], "chosen": [THOUGHT], "rejected": [ANSWER]}, "chosen"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, THOUGHT]}, "rejected"),
        ({"prompt": [USER], "target": [THOUGHT]}, "target[0]"),
    ],
)
def test_invalid_conversations(tmp_path: Path, row: dict[str, Any], key: str):
    assert f"line 1: {key} " in refusal_of(tmp_path, row)


def test_pair_may_repeat_its_prompt(tmp_path: Path):
    problem = load(tmp_path, {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [ANSWER]})
    assert problem.extra["chosen"] == problem.extra["rejected"] == "It is sunny."


WITH_TOOLS = [
    {"prompt": [USER], "chosen": [ANSWER], "rejected": "No."},
    {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "No."}]},
    {"prompt": [USER], "reward_model": {"ground_truth": "sunny"}},
    {"prompt": [USER], "ground_truth": "sunny"},
    {"prompt": [USER], "answer": "sunny"},
    {"question": "Weather in Rome?", "answer": "sunny"},
    {"instruction": "Weather in Rome?", "output": "sunny"},
    {"prompt": [USER], "completion": "It is sunny."},
]


@pytest.mark.parametrize("row", WITH_TOOLS, ids=lambda row: "-".join(row))
def test_tools_of_every_schema_are_in_the_prompt(tmp_path: Path, row: dict[str, Any]):
    problem = load(tmp_path, {**row, "tools": [TOOL]})
    assert "tools" not in problem.extra
    assert json.dumps(TOOL) in Encoder(make_tokenizer(QWEN25)).text(problem)
    for template in (CHATML, None):  # it does not read tools; there is none
        with refused("unsupported", "tools"):
            Encoder(make_tokenizer(template)).prompt(problem)


def test_tools_of_a_demonstration_are_in_the_row_of_sft(tmp_path: Path):
    row = {"instruction": "Weather in Rome?", "output": "It is sunny.", "tools": [TOOL]}
    prompts = Encoder(make_tokenizer(QWEN25))
    encoded = prompts.conversation(load(tmp_path, row))
    assert json.dumps(TOOL) in prompts.decode_raw(encoded.prompt)


def test_tools_of_a_problem_are_kept_by_train(tmp_path: Path):
    problem = load(tmp_path, {"prompt": [USER], "ground_truth": "sunny", "tools": [TOOL]})
    (same,) = as_problems([problem])
    assert same.tools == (TOOL,)


@pytest.mark.parametrize("role", ["Assistant", "bot", "model", "ai", "human", "prompter", "gpt"])
@pytest.mark.parametrize("template", [CHATML, QWEN25, GEMMA])
def test_unknown_roles_are_refused(tmp_path: Path, role: str, template: str):
    prompts = Encoder(make_tokenizer(template))
    odd = {"role": role, "content": "Hm?"}
    key = f"has a message with the role {role!r}, .* system, developer, user, assistant, tool"
    for row in (
        {"messages": [USER, odd, USER, ANSWER]},
        {"prompt": [USER, odd, USER], "ground_truth": "sunny"},
        {"prompt": [odd], "chosen": "yes", "rejected": "no"},
        {"prompt": [odd], "completion": [ANSWER]},
    ):
        problem = load(tmp_path, row)
        with refused("wrong_value", "messages", shows=key):
            prompts.prompt(problem)
        if conversation_of(problem):
            with refused("wrong_value", "messages", shows=key):
                prompts.conversation(problem)
    assert role in refusal_of(tmp_path, {"messages": [USER, odd]})


def test_unknown_speakers_of_sharegpt_are_refused(tmp_path: Path):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "bing", "value": "b"},
        {"from": "human", "value": "c"},
        {"from": "gpt", "value": "d"},
    ]
    problem = load(tmp_path, {"conversations": turns})
    with refused("wrong_value", "messages"):
        Encoder(make_tokenizer(CHATML)).conversation(problem)


@pytest.mark.parametrize("weight", [0, 0.0, False])
def test_weights_of_messages(tmp_path: Path, weight: Any):
    """OpenAI's fine-tuning rows: the conversation keeps weight 0, the prompt has no weights."""
    first = {**ANSWER, "weight": weight}
    messages = [{**USER, "weight": 0}, first, USER, {**ANSWER, "weight": 1}]
    problem = load(tmp_path, {"messages": messages})
    assert problem.messages == (USER, ANSWER, USER)
    assert problem.conversation.messages == (USER, {**ANSWER, "weight": 0}, USER, ANSWER)
    assert problem.demonstrations == ("It is sunny.",)
    assert as_problems([problem])[0].conversation == problem.conversation


def test_a_reply_of_weight_0_is_no_demonstration(tmp_path: Path):
    muted = {**ANSWER, "weight": 0}
    assert load(tmp_path, {"messages": [USER, muted]}).demonstrations == ()
    problem = load(tmp_path, {"prompt": [USER], "completion": [muted]})
    assert problem.demonstrations == () and conversation_of(problem) is None


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({**ANSWER, "weight": 0.5}, r"messages\[1\].weight is 0.5"),
        ({**ANSWER, "weight": "0"}, r"messages\[1\].weight is '0'"),
        ({**USER, "weight": 1}, r"messages\[1\].weight is 1, but its role is user"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, message: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, {"messages": [USER, message, ANSWER]})


def test_a_target_of_weight_0_is_refused(tmp_path: Path):
    row = {"prompt": "Hi", "ground_truth": "1", "target": [{**ANSWER, "weight": 0}]}
    assert "weight 0" in refusal_of(tmp_path, row)
