"""The judging side: runs the tests against a program that lives in another sandbox and is known by its answers only.

Equality with plain data is decided here, never by the program's words: an object of the program's own is not equal to a number,
and not smaller either, whatever it says about itself.
"""

import ast
import builtins
import importlib
import json
import math
import os
import signal
import socket
import sys
import time
from typing import Any

from .confine import confine
from .wire import Gone, Unsupported, Wire, text_of

# Names that belong to Python: a program that defines them (def abs ...) does not change what the tests mean by them.
RESERVED = (
    set(vars(builtins))
    | set(sys.stdlib_module_names)
    | {name for name in vars(math) if not name.startswith("_")}
)
MODULES = sys.stdlib_module_names - {"__main__", "antigravity", "this", "idlelib", "turtle"}


class Remote:
    """An object of the program: its class, its functions, its instances. Every operation is done over there."""

    __slots__ = ("_number", "_wire")

    def __init__(self, wire: "TestWire", number: int) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._wire.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> Any:
        return self._wire.ask("eq", self, other) if isinstance(other, Remote) else False

    def __ne__(self, other: object) -> Any:
        return self._wire.ask("ne", self, other) if isinstance(other, Remote) else True

    def __hash__(self) -> int:
        return self._wire.ask("hash", self)

    def __contains__(self, item: Any) -> bool:
        return bool(self._wire.ask("contains", self, item))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(self._wire.ask("isinstance", instance, self))

    def __reversed__(self) -> Any:
        return self._wire.ask("reversed", self)


def _forward(method: str, what: str) -> None:
    def forwarded(self: Remote, *arguments: Any) -> Any:
        return self._wire.ask(what, self, *arguments)

    setattr(Remote, method, forwarded)


def _turned(method: str, what: str) -> None:
    def forwarded(self: Remote, other: Any) -> Any:
        return self._wire.ask(what, other, self)

    setattr(Remote, method, forwarded)


def _ordered(method: str, what: str) -> None:
    def forwarded(self: Remote, other: Any) -> Any:
        return self._wire.ask(what, self, other) if isinstance(other, Remote) else NotImplemented

    setattr(Remote, method, forwarded)


_ALONE = (
    "len",
    "iter",
    "next",
    "str",
    "repr",
    "bool",
    "int",
    "float",
    "complex",
    "round",
    "format",
    "index",
)
_ALONE += ("getitem", "setitem", "delitem", "neg", "pos", "abs", "invert")
_BOTH = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
for _name in _ALONE:
    _forward(f"__{_name}__", _name)
for _name in _BOTH:
    _what = f"{_name}_" if _name in ("and", "or") else _name
    _forward(f"__{_name}__", _what)
    _turned(f"__r{_name}__", _what)
for _name in ["lt", "le", "gt", "ge"]:
    _ordered(f"__{_name}__", _name)


class TestWire(Wire):
    """Does one thing for the program: call a function that a test has given it as an argument."""

    __test__ = False

    def do(self, what: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        function, *rest = arguments
        if what != "call" or not any(function is lent for lent in self.kept):
            raise ValueError("the tests do nothing but call their own functions")
        return function(*rest)

    def encode_other(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"type": "object", "value": value._number}
        if not callable(value):
            raise Unsupported(
                f"a {type(value).__name__} of the tests cannot be handed to the program"
            )
        return {"type": "function", "value": self.keep(value)}

    def decode_other(self, kind: str, value: Any) -> Any:
        if kind == "function":
            return self.kept[value]
        if kind == "object" and isinstance(value, int):
            return Remote(self, value)
        raise ValueError(f"no value of kind {kind} is expected here")


def main() -> None:
    settings = json.loads(sys.argv[1])
    with os.fdopen(settings["tests"], "rb") as file:
        given = json.load(file)
    confine(settings)
    control = os.fdopen(settings["control"], "w", buffering=1)
    wire = TestWire(socket.socket(fileno=settings["peer"]))

    def say(**message: Any) -> None:
        control.write(json.dumps(message) + "\n")

    def wind_up() -> None:
        """Where nobody outside watches the time, the alarm ends this process, and with it the test that takes too long."""
        signal.setitimer(signal.ITIMER_REAL, settings.get("test_s", 0))

    say(ready=True)
    wind_up()
    try:
        first = wire.receive()
    except (Gone, ValueError, RecursionError):
        say(broken="the program ended while it was loaded")
        return
    if "broken" in first or not isinstance(first.get("names"), dict):
        say(broken=str(first.get("broken"))[:300])
        return
    for index in given["run"]:
        wind_up()
        say(**one_test(index, given, first["names"], wire))


def one_test(
    index: int, given: dict[str, Any], names: dict[str, Any], wire: TestWire
) -> dict[str, Any]:
    """Run one test in a name space of its own; the verdict as a message."""
    start = time.monotonic()
    verdict: dict[str, Any] = {"test": index, "passed": False}
    try:
        code = given["setup"] + "\n" + given["tests"][index]
        tree = ast.parse(code)
        space = {"__name__": "__tests__"} | bind(tree, names, given["entry_point"], wire)
        exec(compile(tree, "test", "exec"), space)
        verdict["passed"] = True
    except Gone:
        verdict["reason"] = "the program ended"
    except Unsupported as error:
        verdict["unsupported"] = str(error)
    except AssertionError as error:
        verdict["reason"] = (
            f"failed: {text_of(error) or given['tests'][index].strip().splitlines()[0]}"[:300]
        )
    except BaseException as error:  # a test may not end the judging side
        verdict["reason"] = f"{type(error).__name__}: {text_of(error)}"[:300]
    verdict["seconds"] = time.monotonic() - start
    return verdict


def bind(
    tree: ast.Module, names: dict[str, Any], entry_point: str, wire: TestWire
) -> dict[str, Any]:
    """What the names in a test mean: the program's functions, and Python's own where the program only shadows them."""
    used = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    wanted = [name for name in dict.fromkeys(used) if name in names]
    own = [name for name in wanted if name not in RESERVED]
    tested = {entry_point} if entry_point in names else set(own) or set(wanted[:1])
    space: dict[str, Any] = {}
    for name in wanted:
        described = names[name]
        kind = described.get("type") if isinstance(described, dict) else None
        if name in RESERVED and name not in tested:
            space |= _pythons(name)
        elif kind == "imported":
            space |= _imported(name, *described["value"])
        elif kind == "module":
            space |= _pythons(name)
        else:
            space[name] = wire.decode(described)
    return space


def _pythons(name: str) -> dict[str, Any]:
    """Python's own meaning of a name: nothing for a builtin (it is there anyway), a module, or a function of math."""
    if name in vars(builtins):
        return {}
    if name in MODULES:
        return {name: importlib.import_module(name)}
    return {name: getattr(math, name)} if hasattr(math, name) else {}


def _imported(name: str, origin: Any, own_name: Any) -> dict[str, Any]:
    """What the program took from the standard library under its own name; under another name it is not taken over."""
    if name != own_name or origin not in MODULES:
        return {}
    module = importlib.import_module(origin)
    return {name: getattr(module, name)} if hasattr(module, name) else {}
