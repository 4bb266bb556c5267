"""The protobuf wire format: just what the messages of messages.py need.

A message is a sequence of fields. A field is a key, `number << 3 | wire type`, and a value: a
varint (type 0), eight bytes (1), a length and bytes (2) or four bytes (5).
"""

import struct
from collections.abc import Iterable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10

Fields = dict[int, list[int | bytes]]  # values by field number, in order


class DecodeError(ValueError):
    """The bytes are not a protobuf message."""


def decode(message: bytes) -> Fields:
    """Return the fields of a message. Raises DecodeError.

    Varints are unsigned integers; all other values are bytes.
    """
    fields: Fields = {}
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        value: int | bytes
        kind = key & 7
        if kind == VARINT:
            value, position = _read_varint(message, position)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(kind)
            if kind == BYTES:
                size, position = _read_varint(message, position)
            if size is None or position + size > len(message):
                raise DecodeError("the message is cut off or has an unknown wire type")
            value = message[position : position + size]
            position += size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = 0
    for i, byte in enumerate(message[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, position + i + 1
    raise DecodeError("a number is cut off or too long")


def get_bytes(fields: Fields, number: int) -> bytes:
    """Return the last value of a field that holds bytes; b"" if it is missing."""
    value = fields.get(number, [b""])[-1]
    if isinstance(value, int):
        raise DecodeError(f"field {number} is a number")
    return value


def get_text(fields: Fields, number: int) -> str:
    """Return the last value of a text field; "" if it is missing."""
    try:
        return get_bytes(fields, number).decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"field {number} is not UTF-8") from error


def get_int(fields: Fields, number: int) -> int:
    """Return the last value of an unsigned integer field; 0 if it is missing."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise DecodeError(f"field {number} is not a number")
    return value


def get_ints(fields: Fields, number: int) -> list[int]:
    """Return all values of a repeated integer field, packed or not."""
    values: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            values.append(value)
            continue
        position = 0
        while position < len(value):
            item, position = _read_varint(value, position)
            values.append(item)
    return values


def get_double(fields: Fields, number: int) -> float:
    """Return the last value of a double field; 0.0 if it is missing."""
    if number not in fields:
        return 0.0
    value = get_bytes(fields, number)
    if len(value) != 8:
        raise DecodeError(f"field {number} is not a double")
    return struct.unpack("<d", value)[0]


def get_messages(fields: Fields, number: int) -> list[Fields]:
    """Return all values of a field that holds messages."""
    messages: list[Fields] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            raise DecodeError(f"field {number} is a number")
        messages.append(decode(value))
    return messages


def get_map(fields: Fields, number: int) -> dict[str, Fields]:
    """Return the entries of a map with text keys: key to entry, whose value is field 2."""
    return {get_text(entry, 1): entry for entry in get_messages(fields, number)}


# ---- writing


def encode_bytes(number: int, value: bytes | str) -> bytes:
    """Return a field that holds bytes, a text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def encode_int(number: int, value: int) -> bytes:
    """Return a field that holds an unsigned integer."""
    return _varint(number << 3 | VARINT) + _varint(value)


def encode_ints(number: int, values: Iterable[int]) -> bytes:
    """Return a packed repeated field of unsigned integers."""
    return encode_bytes(number, b"".join(map(_varint, values)))


def encode_double(number: int, value: float) -> bytes:
    """Return a field that holds a double."""
    return _varint(number << 3 | FIXED64) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
