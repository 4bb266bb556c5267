"""The request of POST /v1/responses: its items become the messages of a chat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from postgrad.serving.requests import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    ChatMessage,
    ChatRequest,
    TokenCount,
    ToolFunction,
    check_schema,
    parse_fields,
)

TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
LIMIT = "max_output_tokens"


class FunctionTool(ToolFunction):
    """A tool of the Responses API; unknown keys are ignored."""

    type: Literal["function"]


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
    limit_field: ClassVar[str] = LIMIT
    ignored: ClassVar[set[str]] = IGNORED - {"metadata", "parallel_tool_calls"} | {
        "client_metadata",
        "prompt_cache_retention",
        "stream_options",
    }
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
        "reasoning": ({},),
        "text": ({}, {"format": {"type": "text"}}),
        "truncation": ("disabled",),
    }
    instead: ClassVar[dict[str, str]] = {
        "messages": "input, or the path /v1/chat/completions",
        "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT,
        "logprobs": f'include=["{LOGPROBS}"]',
        "previous_response_id": "the whole conversation in input: this server keeps no responses",
    }

    n: int = Field(1, ge=1, le=1)
    messages: Annotated[
        list[ChatMessage],
        BeforeValidator(lambda given: read_input(given)),
        Field(validation_alias="input", max_length=MAX_MESSAGES),
    ]
    instructions: str = ""
    max_output_tokens: TokenCount | None = None
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS)  # type: ignore[assignment]
    # The second one names what a response would not have anyway.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        []
    )
    # They have no effect; the response repeats them.
    metadata: dict[str, Any] = Field(default_factory=dict)
    parallel_tool_calls: bool = True

    @property
    def prompts(self) -> list[Any]:
        (messages,) = super().prompts
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        return [messages]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
        return [{"type": "function", "function": function} for function in functions]

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_top(self) -> int | None:
        if LOGPROBS in self.include or self.top_logprobs:
            return self.top_logprobs or 0
        return None


def parse_responses(body: Any) -> ResponsesRequest:
    """Return the request. Raises ApiError that names the field."""
    return parse_fields(body, ResponsesRequest)


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
            content = _content_of(message.content, f"{path}.content")
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
            content = _content_of(result.output, f"{path}.output")
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


def _content_of(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message. Raises ApiError for parts of other kinds."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.get("type") == "input_image":
            parts.append({"type": "image_url", "image_url": part.get("image_url")})
        elif part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            reason = f"{path}: must be a text or a list of texts and pictures"
            raise ApiError(400, reason, path)
    has_pictures = any(part["type"] == "image_url" for part in parts)
    return parts if has_pictures else "".join(part["text"] for part in parts)
