"""Reads messages, tool calls and tool schemas from a row, and checks them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from postgrad.data.rows.values import (
    Row,
    RowError,
    checked_text,
    text_of,
    try_json,
    type_name,
    user_turn,
)
from postgrad.pictures import VALUE_FIELDS
from postgrad.problem import Conversation, Message, Problem

# Columns that may be a text or messages. JSON text is messages if all of it has these roles.
TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")

# Fields with the thinking of an assistant message, beside its content.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# OpenAI's field of assistant messages: 0 keeps a message out of the loss of SFT, 1 is the default.
WEIGHT = "weight"
LOSS = "loss"  # ms-swift's field of the same meaning: false or true

# Fields of a message that describe it, as objects or lists: those of AM-DeepSeek-R1-Distilled,
# WildChat and SWE-smith.
NOTE_FIELDS = ("info", "metadata", "header", "usage", "tool_call_ids", "annotations")

IMAGE = {"type": "image"}  # the part of a content where a picture is

# Columns that some files hold as JSON text, and csv files always do.
MESSAGE_COLUMNS = (*TEXT_COLUMNS, "messages", "conversations", "conversation")
# Python's text of a list of messages: pandas writes it to csv, with or without commas.
PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")

# The speakers of ShareGPT's turns {from, value}; other names are roles already.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def parse_nested(row: Row) -> Row:
    """Return the row with messages and `reward_model` that are JSON text as lists and objects.

    Other texts stay as they are: a prompt or a reply may be any text, also a list in JSON.

    Raises:
        RowError: a column is a list of messages as Python prints it, which no model should see.
    """
    parsed: Row = {}
    for name in (*MESSAGE_COLUMNS, "reward_model"):
        if not isinstance(row.get(name), str):
            continue
        if name in MESSAGE_COLUMNS and PYTHON_MESSAGES.match(row[name]):
            raise RowError(
                f"{name} is a list of messages as Python prints it, which pandas writes to csv; "
                "write the file as parquet, or the column as JSON (json.dumps)"
            )
        value = try_json(row[name])
        if name == "reward_model":
            is_nested = isinstance(value, dict)
        else:
            is_text = name in TEXT_COLUMNS and not all(map(_is_message, value or ()))
            is_nested = isinstance(value, list) and bool(value) and not is_text
        if is_nested:
            parsed[name] = value
    return {**row, **parsed} if parsed else row


def _is_message(value: Any) -> bool:
    """Whether a value is a message {role, content} of a chat; calls may replace the content."""
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    return "content" in value or "tool_calls" in value


def read_messages(row: Row, name: str) -> tuple[Message, ...]:
    """As read_conversation, of messages that are not trained on, whose weight has no meaning."""
    return without_weights(read_conversation(row, name))


def read_conversation(row: Row, name: str) -> tuple[Message, ...]:
    """Return a list of {role, content} or of ShareGPT's {from, value}, or a user message of a text.

    Null fields, which parquet adds, are left out, except the content of a message that calls tools.
    A content may be a list of text parts, which are joined, unless pictures are between them. Of
    the weights, only 0 is kept.

    Raises:
        RowError: the column is neither of them, or a message is not valid.
    """
    value = row.get(name)
    if isinstance(value, str) or name not in row:
        return user_turn(text_of(row, name))
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else type_name(value)
        advice = "" if value else "; fill it or remove the row"
        raise RowError(
            f"{name} must be a list of messages {{role, content}} or a string, not {given}{advice}"
        )
    return tuple(_read_message(_as_message(one), f"{name}[{i}]") for i, one in enumerate(value))


def without_weights(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages without the field `weight`."""
    return tuple({key: item for key, item in m.items() if key != WEIGHT} for m in messages)


def is_trained(message: Message) -> bool:
    """Whether SFT trains on a message of a conversation: the assistant's, without the weight 0."""
    return message["role"] == "assistant" and message.get(WEIGHT) != 0


def conversation_of(problem: Problem) -> Conversation | None:
    """Return the conversation to imitate: the row's own, or its prompt and first demonstration.

    It ends with its last trained message: those after it have the weight 0. None if all have it.
    """
    conversation = problem.conversation
    if conversation is None:
        if not problem.demonstrations:
            return None
        reply = {"role": "assistant", "content": problem.demonstrations[0]}
        messages = (*problem.messages, reply)
        return Conversation(messages, problem.tools, num_prompt=len(problem.messages))
    if conversation.text:
        return conversation
    messages = conversation.messages
    for end in range(len(messages), conversation.num_prompt, -1):
        if is_trained(messages[end - 1]):
            return replace(conversation, messages=messages[:end])
    return None


def check_last_is_assistant(messages: Sequence[Message], name: str) -> None:
    """Raise RowError if the last message of the column `name` is not the assistant's."""
    role = messages[-1]["role"]
    if role != "assistant":
        raise RowError(f"{name} must end in an assistant message, not {role}")


def check_reply(message: Message, name: str) -> None:
    """Raise RowError for fields beside the content of a message that is read as a text."""
    field = reasoning_field([message])
    if field:
        raise RowError(
            f"{name} has {field}, and only its content would be read; "
            "write the thinking in the content, as <think>...</think>"
        )
    if is_muted(message, name):
        raise RowError(f"{name} has weight 0, but it would be trained on; remove the row")


def text_of_only_message(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the content, if there is one message and it is a trained text without tool calls."""
    if len(messages) > 1 or "tool_calls" in messages[0] or not is_trained(messages[0]):
        return ()
    return (messages[0]["content"],)


def reasoning_field(messages: Sequence[Message]) -> str:
    """Return the field that holds the thinking of one of the messages; "" if none has any."""
    for message in messages:
        for name in REASONING_FIELDS:
            if message.get(name):
                return name
    return ""


def check_replies(messages: Sequence[Message]) -> None:
    """Raise RowError for an empty reply that SFT would train on: it teaches to end at once."""
    for i, message in enumerate(messages, 1):
        has_more = "tool_calls" in message or reasoning_field([message])
        is_empty = not str(message.get("content") or "").strip()
        if is_trained(message) and is_empty and not has_more:
            raise RowError(
                f"message {i} of {len(messages)} is an empty reply of the assistant; fill it, "
                "give it the weight 0, or remove the row"
            )


def read_tools(row: Row) -> tuple[dict[str, Any], ...]:
    """Return the column `tools`: a list of JSON schemas, each an object or JSON text.

    Or all as JSON text.

    Null fields, which parquet adds, are left out of objects; JSON text is kept as it is.
    """
    value = row.get("tools")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = _parse_json(value, "tools")
    if not isinstance(value, list):
        raise RowError(f"tools must be a list of JSON schemas, not {type_name(value)}")
    return tuple(_read_object(tool, f"tools[{i}]") for i, tool in enumerate(value))


def _read_message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{name} must be a message {{role, content}}, not {type_name(message)}")
    if not isinstance(message.get("role"), str):
        raise RowError(f"{name} must be a message {{role, content}}, not an object without a role")
    fields: Message = {}
    for key, value in message.items():
        if key == "tool_calls":
            if value:
                fields[key] = _read_tool_calls(value, f"{name}.{key}")
        elif key == "content" and isinstance(value, list) and value:
            fields[key] = _read_parts(value, f"{name}.{key}", message["role"])
        elif key == "function_call" and value is not None:
            raise RowError(f"{name}.function_call is not read; write the call in tool_calls")
        elif value is not None and not _is_note(key, value):
            fields[key] = checked_text(value, f"{name}.{key}")
    if "content" not in fields:
        if "content" in message and "tool_calls" not in fields:
            raise RowError(f"{name}.content must be a string, not null")
        if "tool_calls" not in fields:
            raise RowError(f"{name} has no content; a message is {{role, content}}")
        fields["content"] = None
    if is_muted(message, name):
        fields[WEIGHT] = 0
    return fields


def _as_message(turn: Any) -> Any:
    """Return the message of a turn {from, value}; others are messages already."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        calls = _calls_of(turn)
        return {"role": "assistant", "content": None, "tool_calls": calls, **message}
    return {"role": SPEAKERS.get(speaker, speaker), "content": turn.get("value"), **message}


def _calls_of(turn: Row) -> list[Any]:
    """Return the calls of a `function_call`: JSON text of {name, arguments}, or of a list.

    Raises RowError if the value is no such text.
    """
    value = turn.get("value")
    calls = try_json(value) if isinstance(value, str) else value
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise RowError(
            "the value of a turn from function_call must be JSON text {name, arguments}, "
            f"not {str(value)[:50]!r}"
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_note(key: str, value: Any) -> bool:
    """Return whether a field is a note on a message, such as `toxic: false`."""
    if key in ("role", "content"):
        return False
    is_plain = isinstance(value, bool | int | float | datetime)
    return is_plain or key in (*NOTE_FIELDS, WEIGHT, LOSS)


def is_muted(message: Row, name: str) -> bool:
    """Return whether an assistant message has weight 0, or ms-swift's `loss: false`.

    Raises RowError for other values, and for a message of another role that is to be trained on.
    """
    key = WEIGHT if message.get(LOSS) is None else LOSS
    weight = message.get(key)
    if weight is None:
        return False
    if weight not in (0, 1):
        raise RowError(f"{name}.{key} is {weight!r}; write 0 or 1")
    role = message.get("role", "assistant")
    if weight == 1 and role != "assistant":
        raise RowError(
            f"{name}.{key} is 1, but its role is {role}, and only assistant messages "
            f"are trained on; remove the {key}"
        )
    return role == "assistant" and weight == 0


def _read_parts(parts: list[Any], name: str, role: str) -> str | list[dict[str, Any]]:
    """Return the text of a content that is a list of {type: text, text}; with pictures the list.

    Raises RowError for others.
    """
    read: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url") and role != "assistant":
            read.append(_read_image(part))
        elif kind == "text":
            text = checked_text(part.get("text"), f"{name}[{i}].text")
            read.append({"type": "text", "text": text})
        else:
            given = f"of type {kind}" if kind else type_name(part)
            raise RowError(
                f"{name}[{i}] must be a part {{type: text, text}}, or {{type: image}} in a message "
                f"that the assistant does not write, not {given}"
            )
    if all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _read_image(part: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a picture, with its value as `image` if it has one."""
    values = [part[name] for name in VALUE_FIELDS if part.get(name) is not None]
    return {**IMAGE, "image": values[0]} if values else IMAGE


def _read_tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """OpenAI's format: a list of {type, function: {name, arguments}}, or of {name, arguments}.

    Arguments that are JSON text become objects: chat templates write them as JSON themselves.
    """
    if not isinstance(value, list):
        raise RowError(f"{name} must be a list of tool calls, not {type_name(value)}")
    calls: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        call = _read_object(item, f"{name}[{i}]")
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(
                f"{name}[{i}] must be a tool call {{function: {{name, arguments}}}} with a name"
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parse_json(arguments or "{}", f"{name}[{i}].arguments")
        if not isinstance(arguments, dict):
            raise RowError(
                f"{name}[{i}].arguments must be an object or JSON text, not {type_name(arguments)}"
            )
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _read_object(value: Any, name: str) -> dict[str, Any]:
    value = _parse_json(value, name) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(value, dict):
        raise RowError(f"{name} must be an object, not {type_name(value)}")
    return value


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is not JSON ({str(error)[:100]}); write an object") from error


def _without_nulls(value: Any) -> Any:
    """Leaves out null fields: parquet gives every object the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
