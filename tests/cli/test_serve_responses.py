"""`postgrad serve`: OpenAI's Responses API with the official client."""

import json

import pytest
from serve_process import LOOK as CHAT_LOOK
from tables import tabled

from postgrad.serving.requests import ApiError
from postgrad.serving.responses_request import parse_responses, read_input

LOOK = {"type": "function", "strict": True} | CHAT_LOOK["function"]
WITH_IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(tool_client):
    return tool_client


def respond(client, given="1+1=", **fields):
    fields = {"max_output_tokens": 6, **fields}
    seed = fields.pop("seed", 3)
    return client.responses.create(model="", input=given, extra_body={"seed": seed}, **fields)


def test_a_text_is_a_user_message_with_instructions_before_it(client):
    ours = respond(client, instructions="12", include=["message.output_text.logprobs"])
    messages = [{"role": "system", "content": "12"}, {"role": "user", "content": "1+1="}]
    chat = client.chat.completions.create(
        model="", messages=messages, max_tokens=6, seed=3, logprobs=True
    )
    (choice,) = chat.choices
    assert ours.output_text == choice.message.content
    (item,) = ours.output
    (part,) = item.content
    expected = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == expected
    is_cut = choice.finish_reason == "length"
    assert ours.status == item.status == ("incomplete" if is_cut else "completed")
    assert (ours.incomplete_details is not None) == is_cut
    assert ours.usage.input_tokens == chat.usage.prompt_tokens
    assert ours.usage.output_tokens == len(part.logprobs) == chat.usage.completion_tokens
    assert ours.instructions == "12" and ours.id.startswith("resp_")


def test_a_stream_has_the_events_of_the_same_response(client):
    whole = respond(client, top_logprobs=2)
    events = list(respond(client, top_logprobs=2, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert kinds[-4:] == ends
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == len(events) - 8
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    last = events[-1].response
    logprobs = [entry.logprob for event in deltas for entry in event.logprobs]
    assert logprobs == [entry.logprob for entry in last.output[0].content[0].logprobs]
    assert all(len(entry.top_logprobs) == 2 for entry in deltas[0].logprobs)
    assert last.output_text == whole.output_text and last.usage == whole.usage
    assert events[0].response.output == []


@pytest.fixture(scope="module")
def response_of_a_call(client, called):
    """The seed of a response that is a call, and the response."""
    seed = called[0] + called[1].index
    return seed, respond(client, tools=[LOOK], seed=seed, max_output_tokens=2)


def test_a_call_is_an_item_and_its_output_goes_to_the_template(client, response_of_a_call):
    _, response = response_of_a_call
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    conversation = [{"role": "user", "content": "1+1="}, *response.output, output]
    ours = respond(client, conversation, tools=[LOOK])
    chat_call = {
        "id": call.call_id,
        "type": "function",
        "function": {"name": "look", "arguments": call.arguments},
    }
    chat = client.chat.completions.create(
        model="",
        messages=[
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": None, "tool_calls": [chat_call]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "2"},
        ],
        tools=[CHAT_LOOK],
        max_tokens=6,
        seed=3,
    )
    assert ours.usage.input_tokens == chat.usage.prompt_tokens
    assert ours.output_text == (chat.choices[0].message.content or "")


def test_a_stream_sends_a_call_at_its_end(client, response_of_a_call):
    seed, response = response_of_a_call
    events = list(respond(client, tools=[LOOK], seed=seed, max_output_tokens=2, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    call = "function_call_arguments"
    ends = ["output_item.added", f"{call}.delta", f"{call}.done", "output_item.done", "completed"]
    assert kinds == ["created", "in_progress", *ends]
    (item,) = events[-1].response.output
    assert (item.name, item.arguments) == (response.output[0].name, response.output[0].arguments)


def test_a_response_repeats_metadata_and_parallel_tool_calls(client):
    plain = respond(client)
    assert plain.metadata == {} and plain.parallel_tool_calls is True
    given = {"metadata": {"run": "7"}, "parallel_tool_calls": False}
    made = respond(client, **given)
    assert made.metadata == {"run": "7"} and made.parallel_tool_calls is False
    created = next(respond(client, stream=True, **given))
    assert created.response.metadata == {"run": "7"}


def test_token_ids_are_returned_on_request(client):
    made = client.responses.create(
        model="", input="1+1=", max_output_tokens=3, extra_body={"return_token_ids": True}
    )
    assert made.usage.output_tokens == len(made.token_ids)
    assert made.usage.input_tokens == len(made.prompt_token_ids)


@tabled("fields, param")
def test_what_is_not_supported_is_refused_with_its_field(fields, param):
    """Wrong types and bounds are in test_serve_fields.py."""
    with pytest.raises(ApiError) as caught:
        parse_responses({"input": "x", **fields})
    assert caught.value.status == 400 and caught.value.param == param


def test_fields_without_an_effect_are_accepted():
    made = parse_responses(
        {
            "input": "x",
            "store": False,
            "metadata": {},
            "parallel_tool_calls": True,
            "reasoning": {"effort": None},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "top_logprobs": 0,
        }
    )
    assert made.num_top is None and made.token_limit is None


def test_items_become_messages_with_calls_in_the_message_before_them():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    system, user, assistant, first, second = read_input(items)
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Hi"}
    assert assistant["content"] == "I look"
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["look", "see"]
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert second["content"] == "2"
