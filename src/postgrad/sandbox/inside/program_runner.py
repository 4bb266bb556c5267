"""Runs the program under test: as a script (`run_script`), or to serve the tests (`serve_tests`).

Started as `python -I -S -c "...; program_runner.main()" SETTINGS`. SETTINGS is JSON with the
limits, the file descriptor of the program's source and that of the pipe that starts the clock.
"""

import asyncio
import builtins
import copy
import functools
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
from .channel import Channel, ChannelClosed, Unsupported, error_text
from .limits import apply_limits

RECURSION_LIMIT = 10_000

BINARY_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
    "and_", "or_", "xor", "lshift", "rshift",
    "eq", "ne", "lt", "le", "gt", "ge", "getitem", "delitem", "contains",
)  # fmt: skip
UNARY_OPERATORS = ("neg", "pos", "invert", "index")
UNARY_FUNCTIONS = (
    len, next, str, repr, hash, bool, int, float, complex, abs, round, format, dir,
)  # fmt: skip

FUNCTION_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    functools.partial,
    type(functools.lru_cache(lambda: None)),
)
ITERATOR_TYPES = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    *[type(iter(value)) for value in ([], (), {}, "", "é", b"", set(), range(0), range(1 << 64))],
    *[type(iter(view)) for view in ({}.values(), {}.items())],
    *[type(reversed(value)) for value in ([], {}, {}.values(), {}.items())],
    *[kind for kind in vars(itertools).values() if isinstance(kind, type)],
)


def perform_call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def perform_setitem(target: Any, key: Any, value: Any) -> None:
    target[key] = value


OPERATIONS: dict[str, Any] = {
    "call": perform_call,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "setitem": perform_setitem,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "class_of": type,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "run_coroutine": asyncio.run,
    "send": lambda generator, value: generator.send(value),
    "close": lambda generator: generator.close(),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context: type(context).__exit__(context, None, None, None),
    **{function.__name__: function for function in UNARY_FUNCTIONS},
    **{name: getattr(operator, name) for name in (*BINARY_OPERATORS, *UNARY_OPERATORS)},
}


class ProgramChannel(Channel):
    """Does what the tests ask for.

    Plain values are sent by value. The program's other objects are kept here and sent as a number
    with the names of their classes. Functions of the tests are `TestFunction`s here.

    Attributes:
        kept: the objects that the tests know by number.
        test_classes: classes that the tests define and whose instances travel by their attributes.
        instances: by number, the instances of these classes that both sides know.
    """

    def __init__(self, connection: socket.socket, module: types.ModuleType) -> None:
        super().__init__(connection)
        self.module = module
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}  # id(object) -> its number; `kept` keeps the ids valid
        self.test_classes: dict[str, type] = {}
        self.instances: dict[int, Any] = {}
        self.instance_numbers: dict[int, int] = {}
        self.in_message: set[int] = set()  # instances whose attributes the message already has

    def send(self, message: dict[str, Any]) -> None:
        self.in_message.clear()
        super().send(message)

    def keep(self, value: Any) -> int:
        """Return the number of an object; the same object has the same number."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation == "define":
            return self.define_class(*arguments)
        if operation in ("iter", "reversed"):
            return Iteration((iter if operation == "iter" else reversed)(*arguments))
        if operation == "content":
            return Content(arguments[0])
        return OPERATIONS[operation](*arguments, **keywords)

    def define_class(self, name: str, source: str) -> None:
        """Take over a class of the tests, unless the program has a class of that name itself."""
        if not isinstance(vars(self.module).get(name), type):
            exec(compile(source, "test", "exec"), self.module.__dict__)
        self.test_classes[name] = vars(self.module)[name]

    def is_mutable(self, value: Any) -> bool:
        return super().is_mutable(value) or self.is_test_instance(value)

    def is_test_instance(self, value: Any) -> bool:
        kind = type(value)
        return self.test_classes.get(kind.__name__) is kind and hasattr(value, "__dict__")

    # ---- values

    def encode_other(self, value: Any) -> Any:
        if isinstance(value, TestFunction):
            return plain.tagged("function", value.number)
        if isinstance(value, Iteration):
            return plain.tagged("iterator", self.keep(value.iterator))
        if isinstance(value, Content):
            return self.encode_content(value.value)
        if isinstance(value, types.ModuleType):
            return plain.tagged("module", value.__name__)
        if self.is_test_instance(value):
            return self.encode_instance(value)
        number = self.keep(value)
        if isinstance(value, type):
            return plain.tagged("class", number) | {"classes": class_names(value)}
        if isinstance(value, FUNCTION_TYPES):
            return plain.tagged("callable", number)
        if isinstance(value, ITERATOR_TYPES):
            return plain.tagged("iterator", number)
        if inspect.iscoroutine(value):
            return plain.tagged("coroutine", number)
        data = plain.tagged("object", number) | {"classes": class_names(type(value))}
        if plain.plain_base(value) is not None:
            data["content"] = self.encode_content(value)
        return data

    def encode_content(self, value: Any) -> Any:
        """Return an instance of a subclass of a plain type as that plain type; None for others."""
        kind = plain.plain_base(value)
        return None if kind is None else plain.write(value, kind, self.encode)

    def encode_instance(self, value: Any) -> Any:
        number = self.instance_numbers.get(id(value))
        if number is None:  # made by the program: negative, so that the tests' numbers stay theirs
            number = -1 - len(self.instance_numbers)
            self.instance_numbers[id(value)] = number
            self.instances[number] = value
        data = plain.tagged("instance", number) | {"class": type(value).__name__}
        if number not in self.in_message:
            self.in_message.add(number)
            attributes = list(vars(value).items())
            data["attributes"] = [[name, self.encode(item)] for name, item in attributes]
        return data

    def decode_other(self, kind: str, data: dict[str, Any]) -> Any:
        if kind == "function":
            return TestFunction(self, data["value"])
        if kind == "instance":
            return self.decode_instance(data)
        return self.kept[data["value"]]

    def decode_instance(self, data: dict[str, Any]) -> Any:
        number = data["value"]
        if number not in self.instances:
            kind = self.test_classes[data["class"]]
            value = object.__new__(kind)
            self.instances[number] = value
            self.instance_numbers[id(value)] = number
        value = self.instances[number]
        if "attributes" in data:
            attributes = {name: self.decode(item) for name, item in data["attributes"]}
            vars(value).clear()
            vars(value).update(attributes)
        return value


class Iteration:
    """An iterator that is sent as one, whatever its class is."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator


class Content:
    """A value whose plain content is sent."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TestFunction:
    """A function of the tests, passed to the program as an argument."""

    __test__ = False

    def __init__(self, channel: ProgramChannel, number: int) -> None:
        self.channel = channel
        self.number = number

    def __call__(self, *arguments: Any) -> Any:
        return self.channel.ask("call", self, *arguments)


def class_names(kind: type) -> list[str]:
    """Return the names of a class and its bases, without the built-in ones."""
    return [base.__name__ for base in kind.__mro__ if base.__module__ != "builtins"]


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.argv = ["program.py"]
    with os.fdopen(settings["program"], "rb") as file:
        source = file.read().decode("utf-8", "surrogatepass")
    apply_limits(settings)
    os.write(settings["ready"], b"r")
    os.close(settings["ready"])
    builtins.exit = builtins.quit = sys.exit  # as the module `site` does
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
    channel = ProgramChannel(connection, module)
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
    except (ChannelClosed, Unsupported):
        pass  # the tests have ended, or refuse this program; they report it
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
        return plain.tagged("object", channel.keep(value)) | {"classes": []}
