"""Tools of a chat: the model's calls in OpenAI's form, and calls of earlier turns for templates."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.environments.calls import CallParser, parse_json, text_before_calls


def find_tool_calls(
    tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return (text before the calls, calls in OpenAI's form) of a response.

    `text` has the special tokens. If a call cannot be read there are none: the client sees the
    text as it is.
    """
    calls = CallParser("auto", tokenizer, tools).parse(text)
    if not calls or any(call.mistake for call in calls):
        return None, []
    entries = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
    return text_before_calls(text) or None, entries


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: without nulls, arguments as objects."""
    made = {key: value for key, value in message.items() if value is not None}
    made.setdefault("content", "")
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_template_call(call) for call in calls]
    return made


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = parse_json(arguments)
        except ValueError:  # a model's mistake: the template shows a call without arguments
            function["arguments"] = {}
    return {**call, "function": function}
