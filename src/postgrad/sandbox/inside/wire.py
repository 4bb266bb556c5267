"""Values and calls over a socket, as JSON lines: plain data travels by value, everything else as a number that only its owner can use.

Each end may ask the other one to do something, and serves requests while it waits for the answer. What an end is willing to do
for the other is the difference between the two: see `Wire.do`.
"""

import builtins
import json
import socket
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_LINE = 32 << 20  # bytes of one message


class Gone(BaseException):
    """The other end has closed the line. Not an Exception, so that no `except Exception` of a test hides it."""


class Unsupported(BaseException):
    """A value of the tests' own that cannot be handed to the program: the test says nothing about the program then."""


class Wire:
    """One end of the line. Subclasses say what is done for the other end (`do`) and what becomes of a value that is not plain."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.reader = line.makefile("rb")
        self.kept: list[Any] = []  # what the other end knows by number

    # ---- messages

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.line.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone from error

    def receive(self) -> dict[str, Any]:
        try:
            line = self.reader.readline(MAX_LINE)
        except OSError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Have the other end do something and return its result. Lists and dicts it changed are changed here, too."""
        values = [self.encode(value) for value in arguments]
        self.send(
            {
                "do": what,
                "arguments": values,
                "named": {name: self.encode(value) for name, value in named.items()},
            }
        )
        while "do" in (answer := self.receive()):
            self.serve(answer)
        if "raised" in answer:
            raise error_named(str(answer["raised"][0]), str(answer["raised"][1]))
        for index, changed in answer.get("changed", []):
            rewrite(arguments[index], self.decode(changed))
        return self.decode(answer["value"])

    def serve(self, request: dict[str, Any]) -> None:
        """Do what was asked and answer, whatever happens."""
        try:
            arguments = [self.decode(value) for value in request["arguments"]]
            named = {name: self.decode(value) for name, value in request["named"].items()}
            value = self.do(request["do"], arguments, named)
            changed = [
                [index, now]
                for index, (was, argument) in enumerate(
                    zip(request["arguments"], arguments, strict=True)
                )
                if isinstance(argument, list | dict | set | bytearray | deque)
                and (now := self.encode(argument)) != was
            ]
            answer = {"value": self.encode(value), "changed": changed}
        except (Gone, Unsupported):
            raise
        except (
            BaseException
        ) as error:  # also SystemExit: the program must not end its tests by leaving
            answer = {"raised": [type(error).__name__, text_of(error)]}
        self.send(answer)

    def do(self, what: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        raise NotImplementedError

    # ---- values

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def encode_other(self, value: Any) -> dict[str, Any]:
        raise NotImplementedError

    def decode_other(self, kind: str, value: Any) -> Any:
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Plain data as JSON with tags; a subclass of a plain type travels as that type."""
        if (
            value is None
            or value is True
            or value is False
            or (type(value) is int and -BIG < value < BIG)
        ):
            return value
        if isinstance(value, type):
            known = vars(builtins).get(value.__name__) is value
            return (
                {"type": "builtin", "value": value.__name__} if known else self.encode_other(value)
            )
        for kind, (write, _) in CODECS.items():
            if isinstance(value, kind):
                written = write(self, value)
                return written if kind in JSON_TYPES else {"type": kind.__name__, "value": written}
        return self.encode_other(value)

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind, content = value["type"], value["value"]
        if kind == "builtin":
            found = vars(builtins).get(content)
            if not isinstance(found, type):
                raise ValueError("not a builtin type")
            return found
        return READERS[kind](self, content) if kind in READERS else self.decode_other(kind, content)


JSON_TYPES = (float, str, list)
BIG = 1 << 64

# type -> (how it is written, how it is read); int is written as text beyond 64 bits, since JSON readers limit digits
CODECS: dict[type, tuple[Callable[[Wire, Any], Any], Callable[[Wire, Any], Any]]] = {
    int: (lambda _, v: hex(v), lambda _, v: int(v, 16)),
    float: (lambda _, v: float(v), lambda _, v: float(v)),
    str: (lambda _, v: str.__str__(v), lambda _, v: str(v)),
    bytes: (lambda _, v: v.hex(), lambda _, v: bytes.fromhex(v)),
    bytearray: (lambda _, v: v.hex(), lambda _, v: bytearray.fromhex(v)),
    list: (
        lambda w, v: [w.encode(x) for x in list.__iter__(v)],
        lambda w, v: [w.decode(x) for x in v],
    ),
    tuple: (
        lambda w, v: [w.encode(x) for x in tuple.__iter__(v)],
        lambda w, v: tuple(w.decode(x) for x in v),
    ),
    set: (
        lambda w, v: [w.encode(x) for x in set.__iter__(v)],
        lambda w, v: {w.decode(x) for x in v},
    ),
    frozenset: (
        lambda w, v: [w.encode(x) for x in frozenset.__iter__(v)],
        lambda w, v: frozenset(w.decode(x) for x in v),
    ),
    dict: (
        lambda w, v: [[w.encode(key), w.encode(item)] for key, item in dict.items(v)],
        lambda w, v: {w.decode(key): w.decode(item) for key, item in v},
    ),
    deque: (lambda w, v: [w.encode(x) for x in v], lambda w, v: deque(w.decode(x) for x in v)),
    complex: (lambda _, v: [v.real, v.imag], lambda _, v: complex(*v)),
    Fraction: (lambda _, v: str(v), lambda _, v: Fraction(v)),
    Decimal: (lambda _, v: str(v), lambda _, v: Decimal(v)),
    range: (
        lambda _, v: [hex(v.start), hex(v.stop), hex(v.step)],
        lambda _, v: range(*(int(x, 16) for x in v)),
    ),
}
READERS = {kind.__name__: read for kind, (_, read) in CODECS.items()}


def rewrite(old: Any, new: Any) -> None:
    """Give a list, dict, set, bytearray or deque the content of another one, in place."""
    if isinstance(old, list | bytearray) and type(old) is type(new):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)
    elif isinstance(old, deque) and isinstance(new, deque):
        old.clear()
        old.extend(new)


def error_named(name: str, text: str) -> Exception:
    """The builtin exception of that name, or a RuntimeError that names the program's own."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like want more arguments
            pass
    return RuntimeError(f"{name}: {text}")


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # an exception may fail to print itself
        return ""
