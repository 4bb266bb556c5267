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
Codec = tuple[Callable[[Any, Convert], Any], Callable[[Any, Convert], Any]]  # (write, read)

BIG_INT = 1 << 64  # integers from here on are written as text: JSON readers limit digits
FACTORIES = (int, float, str, bool, list, tuple, dict, set)  # of a defaultdict
ARRAY_KINDS = "biufcSU"  # dtype.kind of the NumPy arrays that are plain


def _write_items(value: Any, encode: Convert) -> list[Any]:
    return [encode(item) for item in _plain_iterator(value)]


def _plain_iterator(value: Any) -> Any:
    """Return an iterator over a container's own items, whatever __iter__ of a subclass says."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
    for kind in kinds:
        if isinstance(value, kind):
            return kind.__iter__(value)
    return iter(value)


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


def _write_deque(value: Any, encode: Convert) -> list[Any]:
    return [value.maxlen, _write_items(value, encode)]


def _read_deque(data: Any, decode: Convert) -> "deque[Any]":
    maxlen, items = data
    return deque(map(decode, items), maxlen)


def _write_complex(value: Any, encode: Convert) -> list[float]:
    return [value.real, value.imag]


def _write_fraction(value: Any, encode: Convert) -> list[str]:
    return [hex(value.numerator), hex(value.denominator)]


def _read_fraction(data: Any, decode: Convert) -> Fraction:
    numerator, denominator = data
    return Fraction(int(numerator, 16), int(denominator, 16))


def _write_range(value: Any, encode: Convert) -> list[str]:
    return [hex(value.start), hex(value.stop), hex(value.step)]


def _read_range(data: Any, decode: Convert) -> range:
    start, stop, step = data
    return range(int(start, 16), int(stop, 16), int(step, 16))


def _write_timedelta(value: Any, encode: Convert) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _write_iso(value: Any, encode: Convert) -> str:
    return value.isoformat()


def _write_namedtuple(value: Any, encode: Convert) -> list[Any]:
    return [type(value).__name__, list(value._fields), _write_items(tuple(value), encode)]


def _read_namedtuple(data: Any, decode: Convert) -> Any:
    name, fields, items = data
    kind = namedtuple(name, fields)  # type: ignore[misc]
    return kind(*map(decode, items))


def _read_dict_values(data: Any, decode: Convert) -> Any:
    return dict(enumerate(map(decode, data))).values()


MUTABLE_TYPES = (list, bytearray, deque, set, dict, OrderedDict, Counter, defaultdict)
# Written as JSON's own values.
JSON_TYPES = (float, str, list)

CODECS: dict[type, Codec] = {
    int: (lambda value, _: hex(value), lambda data, _: int(data, 16)),
    float: (lambda value, _: float.__float__(value), lambda data, _: float(data)),
    str: (lambda value, _: str.__str__(value), lambda data, _: str(data)),
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
    deque: (_write_deque, _read_deque),
    complex: (_write_complex, lambda data, _: complex(*data)),
    Fraction: (_write_fraction, _read_fraction),
    Decimal: (lambda value, _: str(value), lambda data, _: Decimal(data)),
    range: (_write_range, _read_range),
    datetime.datetime: (_write_iso, lambda data, _: datetime.datetime.fromisoformat(data)),
    datetime.date: (_write_iso, lambda data, _: datetime.date.fromisoformat(data)),
    datetime.time: (_write_iso, lambda data, _: datetime.time.fromisoformat(data)),
    datetime.timedelta: (_write_timedelta, lambda data, _: datetime.timedelta(*data)),
    type({}.keys()): (_write_items, lambda data, decode: dict.fromkeys(map(decode, data)).keys()),
    type({}.values()): (_write_items, _read_dict_values),
    type({}.items()): (_write_items, lambda data, decode: dict(map(decode, data)).items()),
}
READERS = {kind.__name__: read for kind, (_, read) in CODECS.items()}
READERS["namedtuple"] = _read_namedtuple


def plain_base(value: Any) -> type | None:
    """Return the plain type that a value's class is or derives from, or None."""
    for kind in type(value).__mro__:
        if kind in CODECS:
            return kind
    return None


def is_namedtuple(value: Any) -> bool:
    """Return whether a value is an instance of a class that namedtuple() made, and nothing more."""
    kind = type(value)
    if kind.__bases__ != (tuple,):
        return False
    fields = vars(kind).get("_fields")
    return isinstance(fields, tuple) and all(type(field) is str for field in fields)


def write(value: Any, kind: type, encode: Convert) -> Any:
    """Return JSON for a value whose class is, or derives from, the plain type `kind`."""
    if kind is int and -BIG_INT < value < BIG_INT:
        return int.__index__(value)
    data = CODECS[kind][0](value, encode)
    return data if kind in JSON_TYPES else tagged(kind.__name__, data)


def write_other(value: Any, encode: Convert) -> dict[str, Any] | None:
    """Return JSON for namedtuples, built-in types, NumPy arrays and scalars; None for the rest."""
    if is_namedtuple(value):
        return tagged("namedtuple", _write_namedtuple(value, encode))
    if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
        return tagged("builtin", value.__name__)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if _is_array(value) and value.dtype.kind in ARRAY_KINDS:
        items = encode(value.ravel().tolist())
        return tagged("ndarray", [value.dtype.str, list(value.shape), items])
    if isinstance(value, numpy.generic) and value.dtype.kind in ARRAY_KINDS:
        return tagged("scalar", [value.dtype.str, encode(value.item())])
    return None


def tagged(kind: str, data: Any) -> dict[str, Any]:
    """Return the JSON form of a value that JSON itself does not have."""
    return {"type": kind, "value": data}


def read(kind: str, data: Any, decode: Convert) -> Any:
    """Rebuild a tagged plain value.

    Raises:
        LookupError: no plain value has this tag.
        Exception: the data is malformed.
    """
    if kind == "builtin":
        found = vars(builtins)[data]
        if not isinstance(found, type):
            raise ValueError(f"{data} is not a built-in type")
        return found
    if kind in ("ndarray", "scalar"):
        return _read_numpy(kind, data, decode)
    return READERS[kind](data, decode)


def _read_numpy(kind: str, data: Any, decode: Convert) -> Any:
    import numpy  # where the sandbox has no NumPy, no program can return an array either

    dtype = numpy.dtype(data[0])
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"arrays of {dtype} are not plain")
    if kind == "scalar":
        return dtype.type(decode(data[1]))
    _, shape, items = data
    return numpy.array(decode(items), dtype=dtype).reshape(shape)


def is_mutable(value: Any) -> bool:
    """Return whether a value is a container of a plain type that can change in place."""
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
