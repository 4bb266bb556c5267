"""Requests with wrong fields, made from the request models: each is refused by its field's name."""

import json
from typing import Any

import pytest
from request_fields import wrong_fields

from postgrad.serving.generate import GenerateBody, parse_generate
from postgrad.serving.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from postgrad.serving.responses_request import ResponsesRequest, parse_responses

CHAT = {"messages": [{"role": "user", "content": "1"}]}
# The endpoint's request model, its parser, a good request, and fields that it has not or ignores.
ENDPOINTS: dict[str, tuple[Any, Any, dict[str, Any], set[str]]] = {
    "completions": (CompletionRequest, lambda b: parse_request(b, False), {"prompt": "1"}, set()),
    "chats": (ChatRequest, lambda body: parse_request(body, True), CHAT, set()),
    "responses": (
        ResponsesRequest,
        parse_responses,
        {"input": "1"},
        {"max_tokens", "max_completion_tokens", "logprobs", "stream_options"},
    ),
    "generate": (GenerateBody, parse_generate, {"token_ids": [1]}, {"stream"}),
}


def refusal(parse: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(body)
    assert refused.value.status == 400 and len(refused.value.reason) < 300
    return refused.value


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_of_another_type_or_out_of_its_bounds_is_refused(endpoint):
    model, parse, good, skipped = ENDPOINTS[endpoint]
    parse(json.loads(json.dumps(good)))
    num_refused = 0
    for name, value in wrong_fields(model, skipped):
        error = refusal(parse, {**good, name: value})
        assert str(error.param).startswith(name), (name, value, error.param)
        num_refused += 1
    for name in model.model_fields:
        unknown = refusal(parse, {**good, f"{name}x": 1})
        assert unknown.param == f"{name}x" and unknown.code == "unknown_parameter"
    assert num_refused > 30


@pytest.mark.parametrize("endpoint", ["completions", "chats", "responses"])
def test_an_unsupported_field_may_only_say_what_is_done_anyway(endpoint):
    model, parse, good, _ = ENDPOINTS[endpoint]
    for name, neutral in model.unsupported.items():
        for value in (*neutral, None):
            parse({**good, name: value})
        error = refusal(parse, {**good, name: {"some": "value"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
    for name in model.ignored:
        parse({**good, name: {"some": "value"}})
    for name, instead in model.instead.items():
        error = refusal(parse, {**good, name: 5})
        assert error.param == name and instead in error.reason
