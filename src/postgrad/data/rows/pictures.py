"""The pictures of a row: read from its column or its messages, each at its place in the messages.

A place is a part {type: image} of a content, or `<image>` in its text. Where a row has neither, its
pictures come first in the first message of the user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.data.rows.messages import IMAGE, MESSAGE_COLUMNS, without_weights
from postgrad.data.rows.values import Row, RowError, is_missing
from postgrad.pictures import (
    PLACEHOLDER,
    Picture,
    PictureError,
    image_parts,
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
    parts = image_parts(messages)
    inside = [part["image"] for part in parts if "image" in part]
    if inside and (values or len(inside) < len(parts)):
        raise RowError(
            "some pictures are in the messages and some are not; give all of them in the parts "
            "{type: image, image}, or all in the column images"
        )
    values = inside or values
    messages = messages if parts else _with_places(messages, len(values))
    num_places = len(image_parts(messages))
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


def without_data(row: Row, names: Mapping[str, str], pictures: Sequence[Picture]) -> Row:
    """Return a row without the data of its pictures, which may be large.

    Its column images has the Pictures, and parts of messages are {type: image}.

    Args:
        row: the row, whose pictures were read.
        names: the name in the shape of each column that was read.
        pictures: what was read.
    """
    light = dict(row)
    for column, name in names.items():
        value = row[column]
        if name == "images" and _values_of(value):
            light[column] = pictures if isinstance(value, list | tuple) else pictures[0]
        elif name in MESSAGE_COLUMNS and isinstance(value, list):
            light[column] = [without_pictures(message) for message in value]
    return light


def _values_of(column: Any) -> list[Any]:
    if isinstance(column, list | tuple):
        return list(column)
    return [] if is_missing(column) else [column]


def _read(value: Any, number: int, folder: Path | None) -> Picture:
    try:
        return read_picture(value, folder).leave_memory()
    except PictureError as error:
        raise RowError(f"picture {number}: {error}; replace it or remove the row") from error


def _with_places(messages: Sequence[Message], num_pictures: int) -> tuple[Message, ...]:
    """Return the messages with parts for each `<image>`; or for all pictures at the start."""
    split = [_split_text(message) for message in messages]
    if image_parts(split) or not num_pictures:
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
    return {**message, "content": split_places(content)}


def split_places(text: str) -> list[dict[str, Any]]:
    """Return a text as parts, with one {type: image} for each `<image>`."""
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(text.split(PLACEHOLDER)):
        parts += [IMAGE] * (i > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts
