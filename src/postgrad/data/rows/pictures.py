"""The pictures of a row: read from its column or its messages, each at its place in the messages.

A place is a part {type: image} of a content, or `<image>` in its text. Where a row has neither, its
pictures come first in the first message of the user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.data.rows.messages import IMAGE, without_weights
from postgrad.data.rows.values import RowError, is_missing
from postgrad.pictures import (
    PLACEHOLDER,
    Picture,
    PictureError,
    read_picture,
    without_pictures,
)
from postgrad.problem import Conversation, Message

Fields = dict[str, Any]


def place_pictures(fields: Fields, column: Any, folder: Path | None) -> Fields:
    """Return the fields of a problem with `images` and one part {type: image} for each.

    Args:
        fields: what a shape has read: `messages` and perhaps a `conversation`.
        column: the value of the column images: a picture, a list of them, or nothing.
        folder: the folder of relative paths.

    Raises:
        RowError: a picture cannot be read, or pictures and places are not equally many.
    """
    conversation: Conversation | None = fields.get("conversation")
    has_turns = conversation is not None and bool(conversation.messages)
    messages = conversation.messages if conversation and has_turns else fields["messages"]
    values = _values_of(column)
    parts = [part for message in messages for part in _image_parts(message)]
    inside = [part["image"] for part in parts if "image" in part]
    if inside and (values or len(inside) < len(parts)):
        raise RowError(
            "some pictures are in the messages and some are not; give all of them in the parts "
            "{type: image, image}, or all in the column images"
        )
    values = inside or values
    messages = messages if parts else _with_places(messages, len(values))
    num_places = sum(len(_image_parts(message)) for message in messages)
    if num_places != len(values):
        raise RowError(
            f"pictures: {num_places} places in the messages ({PLACEHOLDER} or a part of type "
            f"image) and {len(values)} in images; each place needs one picture"
        )
    if not values:
        return fields
    fields["images"] = tuple(_read(value, i, folder) for i, value in enumerate(values, 1))
    messages = tuple(without_pictures(message) for message in messages)
    if conversation and has_turns:
        fields["conversation"] = replace(conversation, messages=messages)
    fields["messages"] = without_weights(messages[: len(fields["messages"])])
    return fields


def without_data(value: Any) -> Any:
    """Return a value of a row without the data of pictures, which may be large."""
    if isinstance(value, Mapping):
        return {name: without_data(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_data(one) for one in value]
    is_data = isinstance(value, bytes | bytearray) or type(value).__module__.startswith("PIL.")
    is_data = is_data or (isinstance(value, str) and value.startswith("data:image/"))
    return None if is_data else value


def _values_of(column: Any) -> list[Any]:
    if isinstance(column, list | tuple):
        return list(column)
    return [] if is_missing(column) else [column]


def _read(value: Any, number: int, folder: Path | None) -> Picture:
    try:
        return read_picture(value, folder).leave_memory()
    except PictureError as error:
        raise RowError(f"picture {number}: {error}; replace it or remove the row") from error


def _image_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if _is_parts(content) else []


def _is_parts(content: Any) -> bool:
    return isinstance(content, list)


def _with_places(messages: Sequence[Message], num_pictures: int) -> tuple[Message, ...]:
    """Return the messages with parts for each `<image>`; or for all pictures at the start."""
    split = [_split_text(message) for message in messages]
    if any(map(_image_parts, split)) or not num_pictures:
        return tuple(split)
    for i, message in enumerate(split):
        if message["role"] == "user":
            text = {"type": "text", "text": message["content"]}
            split[i] = {**message, "content": [*[IMAGE] * num_pictures, text]}
            break
    return tuple(split)


def _split_text(message: Message) -> Message:
    """Return a message with a part for each `<image>` that others than the assistant wrote."""
    content = message["content"]
    if message["role"] == "assistant" or not content or PLACEHOLDER not in content:
        return message
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(content.split(PLACEHOLDER)):
        parts += [IMAGE] * (i > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}
