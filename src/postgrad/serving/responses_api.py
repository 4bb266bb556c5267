"""POST /v1/responses, OpenAI's Responses API: items in and out, in place of a chat's messages.

A request becomes a chat, so rendering, sampling and recording are those of chats. The server keeps
no responses: every request has the whole conversation in `input`.
"""

import uuid
from typing import Any, ClassVar

from postgrad.net.bodies import HttpError
from postgrad.rollout.native.sequence import Job
from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import GenerationRequest
from postgrad.serving.responses import Choice, ResponseBuilder, error_body
from postgrad.serving.responses_request import ResponsesRequest


def make_builder(request: GenerationRequest, served: ModelText, jobs: list[Job]) -> ResponseBuilder:
    """Return what builds the response in the form of the request's path."""
    kind = ResponsesBuilder if isinstance(request, ResponsesRequest) else ResponseBuilder
    return kind(request, served, jobs)


class ResponsesBuilder(ResponseBuilder):
    """A response of the Responses API, complete or as events.

    The text is one message item, and every tool call is an item after it. A response with tools is
    sent at its end, because only the whole of it shows which part is a call.
    """

    ends_with_done: ClassVar[bool] = False

    def __init__(self, request: GenerationRequest, served: ModelText, jobs: list[Job]) -> None:
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
            "metadata": request.metadata,
            "model": self.served.name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": [tool.model_dump() for tool in request.tools],
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
