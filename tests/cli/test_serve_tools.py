"""`postgrad serve` with tools: calls of the model in OpenAI's form, with the official client."""

import json
import threading

import openai
import pytest
from serve_process import LOOK
from tool_model import CALL, KNOWS_TOOLS, chat_tokenizer

from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import ApiError, parse_request
from postgrad.serving.tool_calls import find_tool_calls, template_message

QUESTION = [{"role": "user", "content": "1+1="}]


def ask(client, **fields):
    return client.chat.completions.create(
        model="", messages=QUESTION, max_tokens=2, n=128, **fields
    )


def test_a_call_is_returned_as_tool_call(called):
    _, choice = called
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "look",
        {},
    )
    assert call.id.startswith("call_")


def test_a_stream_sends_the_call_at_its_end(tool_client, called):
    seed, choice = called
    deltas = [
        part
        for chunk in ask(tool_client, tools=[LOOK], seed=seed, stream=True)
        for part in chunk.choices
        if part.index == choice.index
    ]
    assert deltas[-1].finish_reason == "tool_calls"
    (call,) = deltas[-1].delta.tool_calls
    assert (call.index, call.function.name) == (0, "look")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_outside_of_the_event_loop(tool_client, monkeypatch, stream):
    """The lock of the tokenizer may be held while a long prompt is encoded."""
    threads: set[str] = set()
    real = ModelText.find_tool_calls

    def noted(served, request, tokens):
        threads.add(threading.current_thread().name)
        return real(served, request, tokens)

    monkeypatch.setattr(ModelText, "find_tool_calls", noted)
    answer = tool_client.chat.completions.create(
        model="", messages=QUESTION, max_tokens=2, tools=[LOOK], stream=stream
    )
    assert list(answer)
    assert threads and all("AnyIO" in name for name in threads)


def test_without_tools_a_call_is_text(tool_client, called):
    seed, _ = called
    for fields in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        for other in ask(tool_client, seed=seed, **fields).choices:
            assert other.message.tool_calls is None and other.finish_reason != "tool_calls"


def test_answers_of_tools_reach_the_template(tool_client):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "51"},
    ]
    made = tool_client.chat.completions.create(
        model="",
        messages=messages,
        tools=[LOOK],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    with_answer = made.usage.prompt_tokens
    shorter = tool_client.chat.completions.create(
        model="", messages=messages[:2], tools=[LOOK], max_tokens=1
    )
    assert with_answer > shorter.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [LOOK], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(fields, param, tool_client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_client, **fields)
    assert param in str(caught.value)


def test_nulls_inside_of_objects_count_as_absent():
    """Clients that dump their own classes send them."""
    tool = {"type": "function", "function": {"name": "look"}}
    nulls = {"name": "look", "description": None, "parameters": None, "strict": None}
    body = {"messages": QUESTION, "stream": True}
    absent = parse_request(body | {"tools": [tool], "stream_options": {}}, is_chat=True)
    tools = [{"type": None, "function": nulls}]
    given = body | {"tools": tools, "stream_options": {"include_usage": None}}
    assert parse_request(given, is_chat=True) == absent
    with pytest.raises(ApiError, match="name"):
        parse_request(body | {"tools": [{"function": {"name": None}}]}, is_chat=True)


def test_a_call_that_cannot_be_read_stays_text():
    class Tokenizer:
        chat_template = KNOWS_TOOLS + "<tool_call>"
        name_or_path = "x"

    assert find_tool_calls(Tokenizer(), "<tool_call>{</tool_call>", [LOOK]) == (None, [])
    content, calls = find_tool_calls(Tokenizer(), f"I look. {CALL}", [LOOK])
    assert content == "I look." and calls[0]["function"]["name"] == "look"


def test_templates_get_arguments_as_objects():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    made = template_message(message)
    assert made["content"] == "" and "name" not in made
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_messages_of_the_developer_are_the_system_s_unless_the_template_knows_them():
    """The template of Qwen3 leaves out messages with a role that it does not know."""
    known = "{% for m in messages if m.role in ['system', 'user'] %}{{ m.content }}{% endfor %}"
    for template, written in (
        (known, "7112"),
        (
            known + "{% for m in messages if m.role == 'developer' %}={{ m.content }}{% endfor %}",
            "12=71",
        ),
    ):
        tokenizer = chat_tokenizer("0123456789+=x", template)
        served = ModelText("tiny", tokenizer, set(), len(tokenizer))
        messages = [{"role": "developer", "content": "71"}, {"role": "user", "content": "12"}]
        request = parse_request({"model": "tiny", "messages": messages}, is_chat=True)
        assert tokenizer.decode(served.encode(request, request.prompts[0])) == written


@pytest.mark.parametrize("role", ["system", "tool", "robot"])
def test_messages_that_the_template_leaves_out_are_refused(role):
    """The first template of Phi-3 has no place for the system's."""
    messages = [{"role": role, "content": "71"}, {"role": "user", "content": "12"}]
    request = parse_request({"model": "tiny", "messages": messages}, is_chat=True)
    only_user = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    served = ModelText("tiny", chat_tokenizer("0123456789x", only_user), set(), 20)
    with pytest.raises(ApiError, match=f"leaves out messages of role '{role}'"):
        served.encode(request, request.prompts[0])
    # A system message that the template writes anyway is not left out.
    default = "{{ messages[0].content if messages[0].role != 'user' else '71' }}" + only_user
    served = ModelText("tiny", chat_tokenizer("0123456789x", default), set(), 20)
    assert served.encode(request, request.prompts[0]) == [7, 1, 1, 2]


def test_a_template_s_refusal_of_tools_names_no_path_of_the_server():
    template = (
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ tools }}"
    )
    tokenizer = chat_tokenizer("0123456789", template)
    tokenizer.name_or_path = "/home/me/tiny-0"
    served = ModelText("tiny", tokenizer, set(), 20)
    request = parse_request({"messages": QUESTION, "tools": [LOOK]}, is_chat=True)
    with pytest.raises(ApiError, match="template of 'tiny'"):
        served.encode(request, request.prompts[0])


def test_a_template_s_refusal_names_no_setting_of_a_run():
    template = "{{ raise_exception('no tools') }}"
    served = ModelText("tiny", chat_tokenizer("0123456789", template), set(), 20)
    request = parse_request({"model": "tiny", "messages": QUESTION}, is_chat=True)
    with pytest.raises(ApiError, match="no tools") as refused:
        served.encode(request, request.prompts[0])
    assert "data." not in refused.value.reason
