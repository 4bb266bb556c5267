"""Plain values as JSON.

A plain value has exactly one of the types below, and so have its items. The reader rebuilds it from
JSON: nothing of the sender's code comes along. A writer calls `encode` for the items, and a reader
calls `decode`.
"""

import builtins
import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Convert = Callable[[Any], Any]
Writer = Callable[[Any, Convert], Any]
Reader = Callable[[Any, Convert], Any]

BIG_INT = 1 << 64  # integers from here on are written as text: JSON readers limit digits
FACTORIES = (int, float, str, bool, list, tuple, dict, set)  # of a defaultdict
ARRAY_KINDS = "biufcSU"  # dtype.kind of the NumPy arrays that are plain
MUTABLE_TYPES = (list, bytearray, deque, set, dict, OrderedDict, Counter, defaultdict)
# Written as JSON's own values.
JSON_TYPES = (float, str, list)


def _write_items(value: Any, encode: Convert) -> list[Any]:
    return [encode(item) for item in value]


def _write_dict(value: Any, encode: Convert) -> list[Any]:
    return [[encode(key), encode(item)] for key, item in dict.items(value)]


def _read_dict(data: Any, decode: Convert) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in data}


def _write_defaultdict(value: Any, encode: Convert) -> list[Any]:
    factory = value.default_factory
    name = factory.__name__ if factory in FACTORIES else None
    return [name, _write_dict(value, encode)]


def _read_defaultdict(data: Any, decode: Convert) -> "defaultdict[Any, Any]":
    name, items = data
    factories: dict[Any, Any] = {factory.__name__: factory for factory in FACTORIES}
    return defaultdict(factories.get(name), _read_dict(items, decode))


def _read_deque(data: Any, decode: Convert) -> "deque[Any]":
    maxlen, items = data
    return deque(map(decode, items), maxlen)


def _write_hex(*names: str) -> Writer:
    """Return the writer of a value that is made from these integers."""
    return lambda value, _: [hex(getattr(value, name)) for name in names]


def _read_hex(kind: type) -> Reader:
    return lambda data, _: kind(*[int(number, 16) for number in data])


def _read_dict_values(data: Any, decode: Convert) -> Any:
    return dict(enumerate(map(decode, data))).values()


def _write_iso(value: Any, encode: Convert) -> str:
    return value.isoformat()


CODECS: dict[type, tuple[Writer, Reader]] = {
    int: (lambda value, _: hex(value), lambda data, _: int(data, 16)),
    float: (lambda value, _: value, lambda data, _: float(data)),
    str: (lambda value, _: value, lambda data, _: str(data)),
    bytes: (lambda value, _: value.hex(), lambda data, _: bytes.fromhex(data)),
    bytearray: (lambda value, _: value.hex(), lambda data, _: bytearray.fromhex(data)),
    list: (_write_items, lambda data, decode: list(map(decode, data))),
    tuple: (_write_items, lambda data, decode: tuple(map(decode, data))),
    set: (_write_items, lambda data, decode: set(map(decode, data))),
    frozenset: (_write_items, lambda data, decode: frozenset(map(decode, data))),
    dict: (_write_dict, _read_dict),
    OrderedDict: (_write_dict, lambda data, decode: OrderedDict(_read_dict(data, decode))),
    Counter: (_write_dict, lambda data, decode: Counter(_read_dict(data, decode))),
    defaultdict: (_write_defaultdict, _read_defaultdict),
    deque: (lambda value, encode: [value.maxlen, _write_items(value, encode)], _read_deque),
    complex: (lambda value, _: [value.real, value.imag], lambda data, _: complex(*data)),
    Fraction: (_write_hex("numerator", "denominator"), _read_hex(Fraction)),
    Decimal: (lambda value, _: str(value), lambda data, _: Decimal(data)),
    range: (_write_hex("start", "stop", "step"), _read_hex(range)),
    datetime.datetime: (_write_iso, lambda data, _: datetime.datetime.fromisoformat(data)),
    datetime.date: (_write_iso, lambda data, _: datetime.date.fromisoformat(data)),
    datetime.time: (_write_iso, lambda data, _: datetime.time.fromisoformat(data)),
    datetime.timedelta: (
        _write_hex("days", "seconds", "microseconds"),
        _read_hex(datetime.timedelta),
    ),
    type({}.keys()): (_write_items, lambda data, decode: dict.fromkeys(map(decode, data)).keys()),
    type({}.values()): (_write_items, _read_dict_values),
    type({}.items()): (_write_items, lambda data, decode: dict(map(decode, data)).items()),
}

ARRAY_ATTRIBUTES = (
    "all", "any", "astype", "equals", "item", "max", "mean", "min", "round", "std", "sum", "tolist",
)  # fmt: skip
# What can be read from plain values and arrays, and may so stand for their methods in a test.
ATTRIBUTES = frozenset(name for kind in CODECS for name in dir(kind)).union(ARRAY_ATTRIBUTES)


def _read_namedtuple(data: Any, decode: Convert) -> Any:
    name, fields, encoded = data
    items = [decode(item) for item in encoded]
    for field, item in zip(fields, items, strict=True):
        if callable(item) and field in ATTRIBUTES:
            raise ValueError(f"a field {field} hides a method of tuples")
    return namedtuple(name, fields)(*items)  # type: ignore[misc]


def _read_builtin(data: Any, decode: Convert) -> type:
    found = vars(builtins)[data]
    if not isinstance(found, type):
        raise ValueError(f"{data} is not a built-in type")
    return found


def _array_dtype(name: str) -> Any:
    import numpy  # where the sandbox has no NumPy, no program can return an array either

    dtype = numpy.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"arrays of {dtype} are not plain")
    return dtype


def _read_array(data: Any, decode: Convert) -> Any:
    import numpy

    name, shape, items = data
    return numpy.array(decode(items), _array_dtype(name)).reshape(shape)


READERS: dict[str, Reader] = {kind.__name__: read for kind, (_, read) in CODECS.items()}
READERS["namedtuple"] = _read_namedtuple
READERS["builtin"] = _read_builtin
READERS["ndarray"] = _read_array
READERS["scalar"] = lambda data, decode: _array_dtype(data[0]).type(decode(data[1]))


def write(value: Any, encode: Convert) -> Any:
    """Return JSON for a plain value, or None for another one."""
    kind = type(value)
    if kind is int and -BIG_INT < value < BIG_INT:
        return value
    if kind in CODECS:
        data = CODECS[kind][0](value, encode)
        return data if kind in JSON_TYPES else tagged(kind.__name__, data)
    if _is_namedtuple(kind):
        items = _write_items(value, encode)
        return tagged("namedtuple", [kind.__name__, list(vars(kind)["_fields"]), items])
    if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
        return tagged("builtin", value.__name__)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if value.dtype.kind not in ARRAY_KINDS:
        return None
    if kind is numpy.ndarray:
        items = encode(value.ravel().tolist())
        return tagged("ndarray", [value.dtype.str, list(value.shape), items])
    return tagged("scalar", [value.dtype.str, encode(value.item())])


def _is_namedtuple(kind: Any) -> bool:
    """Return whether namedtuple() made the class, and nothing was added."""
    fields = vars(kind).get("_fields")
    if kind.__bases__ != (tuple,) or not isinstance(fields, tuple):
        return False
    return all(type(field) is str for field in fields)


def tagged(kind: str, data: Any) -> dict[str, Any]:
    """Return the JSON form of a value that JSON itself does not have."""
    return {"type": kind, "value": data}


def is_mutable(value: Any) -> bool:
    """Return whether a value can change in place."""
    return type(value) in MUTABLE_TYPES or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def rewrite(old: Any, new: Any) -> None:
    """Give a mutable container the content of another one of its type, in place."""
    kind = type(old)
    if kind is not type(new):
        return
    if kind in (list, bytearray):
        old[:] = new
    elif kind is deque:
        old.clear()
        old.extend(new)
    elif kind in MUTABLE_TYPES:
        old.clear()
        old.update(new)
    elif _is_array(old):
        old[...] = new
