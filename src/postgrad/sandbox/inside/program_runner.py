"""Runs the program under test: as a script (`run_script`), or to serve the tests (`serve_tests`).

Started as `python -I -S -c "...; program_runner.main()" SETTINGS`. SETTINGS is JSON with the
limits, the file descriptor of the program's source and that of the pipe that starts the clock.
"""

import asyncio
import builtins
import importlib
import inspect
import itertools
import json
import operator
import os
import socket
import sys
import types
from typing import Any

from . import plain
from .channel import NOTHING, Channel, ChannelClosed, error_text
from .limits import apply_limits

RECURSION_LIMIT = 10_000
# Where a class has one of these, the identity of its instances does not say what == and bool() say.
OWN_OPERATORS = ("__eq__", "__bool__", "__len__")

_EMPTY: tuple[Any, ...] = ([], (), {}, "", "é", b"", set(), range(0), range(1 << 64))
ITERATOR_TYPES = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    *[type(iter(value)) for value in (*_EMPTY, {}.values(), {}.items())],
    *[type(reversed(value)) for value in ([], {}, {}.values(), {}.items())],
    *[kind for kind in vars(itertools).values() if isinstance(kind, type)],
)


def perform_call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def perform_getattr(target: Any, name: str) -> Any:
    """Return an attribute, or NOTHING if there is none. A property may raise AttributeError."""
    try:
        return getattr(target, name)
    except AttributeError:
        missing = object()
        if inspect.getattr_static(target, name, missing) is not missing:
            raise
        return NOTHING


def perform_rewrite(target: Any, name: str, value: Any) -> None:
    """Give a list, dict ... that is an attribute the content that the test has given its copy."""
    plain.rewrite(getattr(target, name), value)


def perform_next(iterator: Any) -> Any:
    return next(iterator, NOTHING)


def perform_send(generator: Any, value: Any) -> Any:
    try:
        return generator.send(value)
    except StopIteration:
        return NOTHING


OPERATIONS: dict[str, Any] = {
    "call": perform_call,
    "getattr": perform_getattr,
    "setattr": setattr,
    "delattr": delattr,
    "rewrite": perform_rewrite,
    "isinstance": isinstance,
    "class_of": type,
    "next": perform_next,
    "send": perform_send,
    "close": lambda generator: generator.close(),
    "run_coroutine": asyncio.run,
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context: bool(type(context).__exit__(context, None, None, None)),
}


class ProgramChannel(Channel):
    """Does what the tests ask for.

    Attributes:
        kept: the objects that the tests know by number.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}  # id(object) -> its number; `kept` keeps the ids valid

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        return OPERATIONS[operation](*arguments, **keywords)

    def encode_other(self, value: Any) -> Any:
        if isinstance(value, TestFunction):
            return plain.tagged("function", value.number)
        if isinstance(value, types.ModuleType):
            return plain.tagged("module", value.__name__)
        if isinstance(value, ITERATOR_TYPES):
            return plain.tagged("iterator", self.keep(value))
        if inspect.iscoroutine(value):
            return plain.tagged("coroutine", self.keep(value))
        bases = type(value).__mro__[:-1]  # without object
        has_operators = any(name in vars(base) for base in bases for name in OWN_OPERATORS)
        return plain.tagged("object", self.keep(value)) | {"has_operators": has_operators}

    def keep(self, value: Any) -> int:
        """Return the number of an object; the same object has the same number."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def decode_other(self, kind: str, value: Any, data: dict[str, Any]) -> Any:
        if kind == "function":
            return TestFunction(self, value)
        if kind == "standard":
            module, name = value
            return operator.attrgetter(name)(importlib.import_module(module))
        return self.kept[value]


class TestFunction:
    """A function of the tests, passed to the program as an argument."""

    __test__ = False

    def __init__(self, channel: ProgramChannel, number: int) -> None:
        self.channel = channel
        self.number = number

    def __call__(self, *arguments: Any) -> Any:
        return self.channel.ask("call", self, *arguments)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.argv = ["program.py"]
    with os.fdopen(settings["program"], "rb") as file:
        source = file.read().decode("utf-8", "surrogatepass")
    apply_limits(settings)
    os.write(settings["ready"], b"r")
    os.close(settings["ready"])
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module `site` does
    sys.setrecursionlimit(RECURSION_LIMIT)
    if settings["peer"] is None:
        run_script(source)
    else:
        serve_tests(source, socket.socket(fileno=settings["peer"]))


def run_script(source: str) -> None:
    """Run the program as `python program.py` does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)


def serve_tests(source: str, connection: socket.socket) -> None:
    """Load the program, send its global names, then serve requests until the tests end."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    channel = ProgramChannel(connection)
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too
        channel.send({"broken": f"{type(error).__name__}: {error_text(error)}"})
        return
    names = {
        name: describe(value, channel)
        for name, value in list(vars(module).items())
        if not name.startswith("__")
    }
    try:
        channel.send({"names": names})
        while True:
            channel.serve(channel.receive())
    except ChannelClosed:
        pass  # the tests have ended
    finally:
        os._exit(0)  # the program's threads must not keep the process alive


def describe(value: Any, channel: ProgramChannel) -> Any:
    """Return a global name of the program for the tests.

    It is encoded as other values are. What comes from the standard library also has its module and
    name; an exception class is described by the names of its bases.
    """
    try:
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        is_standard = isinstance(module, str) and module in sys.stdlib_module_names
        if is_standard and isinstance(name, str):
            return channel.encode(value) | {"imported": [module, name]}
        if isinstance(value, type) and issubclass(value, BaseException):
            return plain.tagged("exception", [kind.__name__ for kind in value.__mro__])
        return channel.encode(value)
    except Exception:  # a value that cannot be encoded, a list that contains itself for instance
        return plain.tagged("object", channel.keep(value)) | {"has_operators": True}
