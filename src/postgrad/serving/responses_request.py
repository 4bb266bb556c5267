"""The request of POST /v1/responses: its items become the messages of a chat."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from postgrad.serving.requests import (
    ApiError,
    ChatRequest,
    TokenCount,
    check_schema,
    parse_fields,
)

TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
# `include` may name what a response would not have anyway.
NO_EFFECT = ("reasoning.encrypted_content",)
# Fields that would change the response and are not implemented, with the value that is allowed.
UNSUPPORTED: dict[str, Any] = {
    "background": False,
    "conversation": None,
    "max_tool_calls": None,
    "n": 1,
    "prompt": None,
    "reasoning": {},
    "truncation": "disabled",
}
# Fields of /v1/chat/completions, with what to use in place of them.
CHAT_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": f'include=["{LOGPROBS}"]',
}
IGNORED = ("client_metadata", "prompt_cache_retention", "stream_options")


class FunctionTool(BaseModel):
    """A tool of the Responses API; unknown keys are ignored."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class MessageItem(BaseModel):
    """An item of `input` with a text."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class CallItem(BaseModel):
    """A call that the model made."""

    model_config = ConfigDict(strict=True)

    call_id: str
    name: str
    arguments: str


class CallOutputItem(BaseModel):
    """The result of a call."""

    model_config = ConfigDict(strict=True)

    call_id: str
    output: str | list[dict[str, Any]]


class ResponsesRequest(ChatRequest):
    """The body of POST /v1/responses as a chat."""

    prompt_field: ClassVar[str] = "input"
    limit_field: ClassVar[str] = "max_output_tokens"

    instructions: str = ""
    max_output_tokens: TokenCount | None = None
    # They have no effect; the response repeats them.
    metadata: dict[str, Any] = Field(default_factory=dict)
    parallel_tool_calls: bool = True

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens


def parse_responses(body: Any) -> ResponsesRequest:
    """Return the request. Raises ApiError that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_unsupported(fields)
    for name, instead in CHAT_FIELDS.items():
        if name in fields:
            raise ApiError(
                400,
                f"unknown field {name}, which /v1/chat/completions has; use {instead}",
                name,
                "unknown_parameter",
            )
    messages = read_input(fields.pop("input", None))
    instructions = fields.get("instructions", "")
    if not isinstance(instructions, str):
        raise ApiError(400, "instructions: must be a text", "instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    tools = fields.pop("tools", [])
    if not isinstance(tools, list):
        raise ApiError(400, "tools: must be a list", "tools")
    fields["tools"] = [_chat_tool(tool, number) for number, tool in enumerate(tools)]
    fields["logprobs"] = _wants_logprobs(fields.pop("include", [])) or bool(
        fields.get("top_logprobs")
    )
    if not fields["logprobs"]:
        fields.pop("top_logprobs", None)
    return parse_fields({**fields, "messages": messages}, ResponsesRequest)


def _check_unsupported(fields: dict[str, Any]) -> None:
    """Remove fields without an effect. Raises ApiError for those that would have one."""
    if "previous_response_id" in fields:
        raise ApiError(
            400,
            "this server keeps no responses; send the whole conversation in input",
            "previous_response_id",
            "unsupported_parameter",
        )
    for name in IGNORED:
        fields.pop(name, None)
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and not any(reasoning.values()):
        del fields["reasoning"]
    text = fields.pop("text", {})
    if text and text != {"format": {"type": "text"}}:
        raise ApiError(400, 'text must be {"format": {"type": "text"}}', "text")
    for name, neutral in UNSUPPORTED.items():
        if fields.pop(name, neutral) != neutral:
            raise ApiError(
                400,
                f"{name} is not supported by this server; leave it out",
                name,
                "unsupported_parameter",
            )


def _wants_logprobs(include: Any) -> bool:
    if not isinstance(include, list):
        raise ApiError(400, "include: must be a list", "include")
    for name in include:
        if name != LOGPROBS and name not in NO_EFFECT:
            raise ApiError(400, f"include has only {LOGPROBS} here; leave out {name!r}", "include")
    return LOGPROBS in include


def _chat_tool(tool: Any, number: int) -> dict[str, Any]:
    """Return a tool in the form of chats. Raises ApiError."""
    given = _check_item(tool, FunctionTool, f"tools[{number}]")
    function: dict[str, Any] = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    if given.parameters is not None:
        function["parameters"] = given.parameters
    return {"type": "function", "function": function}


def read_input(given: Any) -> list[dict[str, Any]]:
    """Return the messages of `input`: a text, or a list of items. Raises ApiError.

    Calls belong to the assistant's message before them, if there is one.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input: must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        path = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            message = _check_item(item, MessageItem, path)
            role = "system" if message.role == "developer" else message.role
            content = _text_of(message.content, f"{path}.content")
            messages.append({"role": role, "content": content})
        elif kind == "function_call":
            call = _check_item(item, CallItem, path)
            function = {"name": call.name, "arguments": call.arguments}
            entry = {"id": call.call_id, "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(entry)
        elif kind == "function_call_output":
            result = _check_item(item, CallOutputItem, path)
            content = _text_of(result.output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": result.call_id, "content": content})
        else:
            known = "message, function_call or function_call_output"
            raise ApiError(400, f"{path}: must be an item of type {known}", path)
    return messages


def _check_item(item: Any, schema: type[Any], path: str) -> Any:
    try:
        return check_schema(item, schema)
    except ApiError as error:
        raise ApiError(400, f"{path}: {error.reason}", path) from None


def _text_of(content: str | list[dict[str, Any]], path: str) -> str:
    """Return the text of a content. Raises ApiError for parts that are no texts."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        if part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{path}: must be a text or a list of texts", path)
        texts.append(part["text"])
    return "".join(texts)
