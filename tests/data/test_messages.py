"""Conversations in data files: several turns, tool calls, tool schemas, null contents."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from chat_templates import CHATML, GEMMA, QWEN25, make_tokenizer
from jsonl import write_jsonl
from refused import refused

from postgrad.api.rows import as_problems
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.data.rows.messages import conversation_of
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
    return load_problems(str(write_jsonl(tmp_path / "rows.jsonl", row)))[0]


@pytest.mark.parametrize("column", ["completion", "response"])
def test_completion_keeps_all_its_messages(tmp_path: Path, column: str):
    assert load(tmp_path, {"prompt": [USER], column: [ANSWER]}).demonstrations == ("It is sunny.",)
    problem = load(tmp_path, {"prompt": [USER], column: [CALLING, RESULT, ANSWER]})
    assert problem.messages == (USER,)
    assert problem.conversation == Conversation((USER, CALLING, RESULT, ANSWER), (), num_prompt=1)
    assert problem.demonstrations == (), "a demonstration is one text"


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


def test_tools_are_in_the_row_of_sft_and_kept_by_train(tmp_path: Path):
    row = {"instruction": "Weather in Rome?", "output": "It is sunny.", "tools": [TOOL]}
    prompts = Encoder(make_tokenizer(QWEN25))
    encoded = prompts.conversation(load(tmp_path, row))
    assert json.dumps(TOOL) in prompts.decode_raw(encoded.prompt)
    problem = load(tmp_path, {"prompt": [USER], "ground_truth": "sunny", "tools": [TOOL]})
    assert as_problems([problem])[0].tools == (TOOL,)


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
    with refused("damaged", tmp_path / "rows.jsonl", shows=role):
        load(tmp_path, {"messages": [USER, odd]})


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


def test_a_target_of_weight_0_is_refused(tmp_path: Path):
    row = {"prompt": "Hi", "ground_truth": "1", "target": [{**ANSWER, "weight": 0}]}
    with refused("damaged", tmp_path / "rows.jsonl", shows="weight 0"):
        load(tmp_path, row)
