"""POST /v1/responses, OpenAI's Responses API: items in and out, in place of a chat's messages.

A request becomes a chat, so rendering, sampling and recording are those of chats. The server keeps
no responses: every request has the whole conversation in `input`.
"""

import uuid
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from postgrad.rollout.native.jobs import LiveJob
from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import (
    ApiError,
    ChatRequest,
    GenerationRequest,
    TokenCount,
    check_schema,
    parse_fields,
)
from postgrad.serving.responses import Choice, ResponseBuilder, error_body
from postgrad.web import HttpError

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

    instructions: str = ""
    max_output_tokens: TokenCount | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens


def parse_responses(body: Any) -> ResponsesRequest:
    """Return the request. Raises ApiError that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_unsupported(fields)
    if "messages" in fields:
        raise ApiError(400, "messages is a field of /v1/chat/completions; use input", "messages")
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


def make_builder(
    request: GenerationRequest, served: ModelText, jobs: list[LiveJob]
) -> ResponseBuilder:
    """Return what builds the response in the form of the request's path."""
    kind = ResponsesBuilder if isinstance(request, ResponsesRequest) else ResponseBuilder
    return kind(request, served, jobs)


class ResponsesBuilder(ResponseBuilder):
    """A response of the Responses API, complete or as events.

    The text is one message item, and every tool call is an item after it. A response with tools is
    sent at its end, because only the whole of it shows which part is a call.
    """

    ends_with_done: ClassVar[bool] = False

    def __init__(self, request: GenerationRequest, served: ModelText, jobs: list[LiveJob]) -> None:
        super().__init__(request, served, jobs)
        assert isinstance(request, ResponsesRequest)
        self.body = self._new_body(request)
        self.part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if request.num_top is not None:
            self.part["logprobs"] = []
        self.message: dict[str, Any] = {
            "type": "message",
            "id": f"msg_{uuid.uuid4().hex}",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self.num_events = 0

    def _new_body(self, request: ResponsesRequest) -> dict[str, Any]:
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions or None,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self.served.name,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": [{"type": "function", **tool.function.model_dump()} for tool in request.tools],
            "top_logprobs": request.num_top or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def complete(self) -> dict[str, Any]:
        for choice in self.choices:
            self.next_chunks(choice)
        return self.body

    def first_chunks(self) -> list[dict[str, Any]]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=dict(self.body)) for name in names]

    def next_chunks(self, choice: Choice) -> list[dict[str, Any]]:
        if self.request.tool_schemas and not choice.finish:
            return []
        fields = self.message_fields(choice)
        calls = fields.get("tool_calls", [])
        entries: list[Any] = []
        if self.request.num_top is not None:
            entries = self.chat_logprobs(choice)["content"]
        if self.request.return_token_ids:
            self.body["prompt_token_ids"] = self.prompts[0]
            self.body["token_ids"] = [*self.body.get("token_ids", []), *choice.tokens]
        choice.clear_unsent()
        events: list[dict[str, Any]] = []
        delta = fields["content"] or ""
        if delta or entries or (choice.finish and not calls and not self.message["content"]):
            events += self._add_text(delta, entries)
        if choice.finish:
            events += self._end(choice.finish, calls)
        return events

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return nothing: the last event has the token counts."""
        return []

    def error_chunk(self, error: HttpError) -> dict[str, Any]:
        details = error_body(error)["error"]
        return self._event(
            "error", code=details["code"], message=details["message"], param=details["param"]
        )

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": name, "sequence_number": self.num_events - 1, **fields}

    def _add_text(self, delta: str, entries: list[Any]) -> list[dict[str, Any]]:
        """Add text and log-probs to the message; returns the events."""
        events: list[dict[str, Any]] = []
        place = {"item_id": self.message["id"], "output_index": 0, "content_index": 0}
        if not self.message["content"]:
            item = dict(self.message)
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            part = {"type": "output_text", "text": "", "annotations": []}
            events.append(self._event("response.content_part.added", **place, part=part))
            self.message["content"] = [self.part]
            self.body["output"] = [self.message]
        self.part["text"] += delta
        if "logprobs" in self.part:
            self.part["logprobs"] += entries
        events.append(
            self._event("response.output_text.delta", **place, delta=delta, logprobs=entries)
        )
        return events

    def _end(self, finish: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """End the response; returns the events."""
        is_cut = finish == "length"
        status = "incomplete" if is_cut else "completed"
        events: list[dict[str, Any]] = []
        if self.message["content"]:
            self.message["status"] = status
            place = {"item_id": self.message["id"], "output_index": 0, "content_index": 0}
            logprobs = self.part.get("logprobs", [])
            events += [
                self._event(
                    "response.output_text.done",
                    **place,
                    text=self.part["text"],
                    logprobs=logprobs,
                ),
                self._event("response.content_part.done", **place, part=self.part),
                self._event("response.output_item.done", output_index=0, item=self.message),
            ]
        for call in calls:
            events += self._add_call(call)
        self.body["status"] = status
        if is_cut:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.body["usage"] = self._usage()
        events.append(self._event(f"response.{status}", response=self.body))
        return events

    def _add_call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a tool call to the output; returns the events."""
        arguments = call["function"]["arguments"]
        item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments,
            "status": "completed",
        }
        index = len(self.body["output"])
        self.body["output"] = [*self.body["output"], item]
        started = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        kind = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=started),
            self._event(f"{kind}.delta", **place, delta=arguments),
            self._event(f"{kind}.done", **place, arguments=arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
