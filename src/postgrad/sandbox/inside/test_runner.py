"""Runs the tests against a program in another sandbox, known by its replies only.

Started as `python -I -S -c "...; test_runner.main()" SETTINGS`. SETTINGS is JSON with the limits
and the file descriptors of the tests, of the connection to the program and of the pipe for results.
"""

import ast
import builtins
import json
import operator
import os
import select
import signal
import socket
import sys
import time
import types
from typing import Any, NoReturn

from . import plain
from .channel import NOTHING, Channel, ChannelClosed, error_text
from .handles import Handle, Iterator, Opaque
from .lengths import Lengths
from .limits import apply_limits
from .test_names import bind_names, kind_of
from .test_source import (
    CHECKED_LOOP,
    ENDS,
    check_loops,
    demanded_exceptions,
    has_other_handlers,
)

TEST_MODULE = "__tests__"
FILE_EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "sqlite3.connect")
# A test may read these folders: it imports modules.
LIBRARIES = tuple(f"{path}/" for path in (*sys.path, sys.prefix, sys.base_prefix) if len(path) > 1)


class Violation(BaseException):
    """The program did what no right program does; the test fails, even if it catches this."""


class Unsupported(BaseException):
    """The test cannot be run this way, and says nothing about the program."""


class TestChannel(Channel):
    """The connection to the program. The test runner believes nothing but well-formed replies.

    It does one thing for the program: call functions that a test has passed as arguments.

    Attributes:
        violation: why the test has failed whatever it asserts, or "".
        unsupported: why the test says nothing, or "".
        names_class: the test names a class of the program, so it may need more than plain values.
        demanded: names of the exceptions that the test demands of the program.
        has_handlers: the test catches exceptions that it does not demand.
        errors: the program's exception classes, by name.
        namespace: the global names of the test.
    """

    __test__ = False

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.functions: list[Any] = []  # the tests' functions that the program knows by number
        self.is_reading_call = False  # a request of the program is being decoded
        self.start_test(ast.Module([], []))

    def start_test(self, tree: ast.Module) -> None:
        """Forget what belongs to the last test."""
        self.violation = ""
        self.unsupported = ""
        self.names_class = False
        self.demanded = demanded_exceptions(tree)
        self.has_handlers = has_other_handlers(tree)
        self.errors: dict[str, type[BaseException]] = {}
        self.handles: dict[int, Handle] = {}
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.copies: dict[tuple[int, str], Any] = {}  # attributes that the test has read
        self.lengths = Lengths(self.violate, self.no_items, bool(names & ENDS))
        self.namespace: dict[str, Any] = {}

    # ---- what ends a test

    def violate(self, reason: str) -> NoReturn:
        """Fail the test. Raises Violation."""
        self.violation = self.violation or reason
        raise Violation(self.violation)

    def unsupport(self, reason: str) -> NoReturn:
        """End the test without a result. Raises Unsupported."""
        self.unsupported = self.unsupported or reason
        raise Unsupported(self.unsupported)

    def refuse(self, use: str) -> NoReturn:
        """End a test that uses an object of the program for more than attributes and calls."""
        reason = f"an object of the program is {use}"
        if self.names_class:
            self.unsupport(reason)
        self.violate(reason)

    def refuse_files(self, event: str, arguments: tuple[Any, ...]) -> None:
        """End a test that uses a file: the program has files of its own (an audit hook)."""
        if event not in FILE_EVENTS or not self.namespace:
            return
        path = str(arguments[0])
        if path != ":memory:" and not path.startswith(LIBRARIES):
            self.unsupport(f"the program does not see the file {path[:80]} that the test uses")

    def no_items(self) -> NoReturn:
        self.unsupport("a loop of the test has no items, so it checks nothing")

    # ---- messages

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the program perform an operation and return its result."""
        value = self.request(operation, *arguments, **keywords)
        if value is NOTHING:
            self.violate("the program sent a malformed message")
        return value

    def ask_item(self, operation: str, *arguments: Any) -> Any:
        """Return the next item of an iterator. Raises StopIteration."""
        value = self.request(operation, *arguments)
        if value is NOTHING:
            raise StopIteration
        return value

    def ask_attribute(self, handle: Handle, name: str) -> Any:
        """Return an attribute. Raises AttributeError."""
        value = self.request("getattr", handle, name)
        if value is NOTHING:
            raise AttributeError(name)
        if plain.is_mutable(value):
            self.copies[id(handle), name] = (handle, value, self.encode(value))
        return value

    def send_changes(self) -> None:
        """Have the program's lists, dicts ... follow what the test did with its copies of them."""
        for key, (handle, value, encoded) in list(self.copies.items()):
            now = self.encode(value)
            if now != encoded:
                self.copies[key] = (handle, value, now)
                super().ask("rewrite", handle, key[1], value)

    def request(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        if self.violation:
            raise Violation(self.violation)
        if self.unsupported:
            raise Unsupported(self.unsupported)
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and self.connection.recv(1, socket.MSG_PEEK):
            self.violate("the program wrote to the channel without being asked")
        self.send_changes()
        value = super().ask(operation, *arguments, **keywords)
        self.lengths.add(value)
        return value

    def read_reply(
        self, message: dict[str, Any], request_id: str, arguments: tuple[Any, ...]
    ) -> Any:
        if message.get("reply") != request_id:
            self.violate("the program wrote to the channel without being asked")
        try:
            if "raised" not in message:
                return super().read_reply(message, request_id, arguments)
            error = self.decode_error(message["raised"])
        except Exception:  # whatever is wrong with the message, the program has sent it
            self.violate("the program sent a malformed message")
        raise error

    def receive(self) -> dict[str, Any]:
        try:
            return super().receive()
        except (ValueError, RecursionError, MemoryError):
            self.violate("the program sent a malformed message")

    def serve(self, request: dict[str, Any]) -> None:
        self.is_reading_call = True
        super().serve(request)

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        self.is_reading_call = False
        function, *rest = arguments
        if operation != "call" or not any(function is passed for passed in self.functions):
            raise ValueError("the test runner only calls functions that a test has passed")
        try:
            return function(*rest)
        except AssertionError as error:  # the program must not catch it
            self.violate(f"failed: {error_text(error)}")

    # ---- values

    def encode(self, value: Any) -> Any:
        if issubclass(type(value), Handle):  # isinstance() would ask the program for its class
            return plain.tagged("object", value._handle_number)
        try:
            return super().encode(value)
        except RecursionError:
            self.unsupport("a value of the test is nested too deeply")

    def encode_other(self, value: Any) -> Any:
        name = standard_name(value)
        if name:
            return plain.tagged("standard", name)
        if not self.is_own_function(value):
            kind = type(value).__name__
            self.unsupport(f"a {kind} of the test cannot be sent to the program")
        for number, function in enumerate(self.functions):
            if function is value:
                return plain.tagged("function", number)
        self.functions.append(value)
        return plain.tagged("function", len(self.functions) - 1)

    def is_own_function(self, value: Any) -> bool:
        """Return whether the test defines a function, or it is a method of a plain value."""
        if type(value) is types.BuiltinMethodType:
            return type(value.__self__) in plain.CODECS
        function = value.__func__ if type(value) is types.MethodType else value
        if type(function) is not types.FunctionType:
            return False
        return function.__globals__ is self.namespace

    def decode(self, data: Any) -> Any:
        try:
            return super().decode(data)
        except Exception:  # whatever is wrong with the data, the program has sent it
            self.violate("the program sent a malformed value")

    def decode_other(self, kind: str, value: Any, data: dict[str, Any]) -> Any:
        if type(value) is not int or value < 0:
            raise ValueError("an object needs a number")
        if kind == "function":
            return self.functions[value]
        if self.is_reading_call:
            self.refuse("an argument of a function of the test")
        if kind == "coroutine":
            return self.run_coroutine(Iterator(self, value))
        if value not in self.handles:
            self.handles[value] = self.make_handle(kind, value, data)
        return self.handles[value]

    def make_handle(self, kind: str, number: int, data: dict[str, Any]) -> Handle:
        if kind == "iterator":
            return Iterator(self, number)
        if kind != "object":
            raise ValueError(f"no value of kind {kind} is expected here")
        return Opaque(self, number, data["has_operators"] is True)

    async def run_coroutine(self, handle: Handle) -> Any:
        return self.ask("run_coroutine", handle)

    # ---- exceptions

    def decode_error(self, data: Any) -> BaseException:
        """Return the exception for one that the program raised, if the test demands it."""
        names, text = data
        reason = f"{names[0]}: {text}"[:300]
        if not ENDS.isdisjoint(names):
            self.violate(reason)
        if self.demanded.isdisjoint(names):
            if self.has_handlers:
                self.unsupport(f"the test catches what it does not demand: {reason}")
            self.violate(reason)
        for name in names:
            if name in self.errors:
                return self.errors[name](str(text))
        if "SystemExit" in names:
            return SystemExit(str(text))
        return super().decode_error(data)


def standard_name(value: Any) -> list[str]:
    """Return the module and name of a function or class of Python; [] for other values."""
    owner = getattr(value, "__objclass__", value)  # of str.upper
    if type(value) is types.BuiltinMethodType and isinstance(value.__self__, type):
        owner = value.__self__  # of datetime.now
    module = getattr(owner, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module not in sys.stdlib_module_names or not isinstance(name, str) or "<" in name:
        return []
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return []
    return [module, name] if found == value else []


def main() -> None:
    settings = json.loads(sys.argv[1])
    with os.fdopen(settings["tests"], "rb") as file:
        suite = json.load(file)
    apply_limits(settings)
    results = os.fdopen(settings["control"], "w", buffering=1)
    channel = TestChannel(socket.socket(fileno=settings["peer"]))

    def report(**message: Any) -> None:
        # The key proves that this process has written the line.
        results.write(json.dumps({"key": settings["key"]} | message) + "\n")

    def start_alarm() -> None:
        """End this process after the time of one test, where nobody outside watches the time."""
        signal.setitimer(signal.ITIMER_REAL, settings.get("test_s", 0))

    sys.addaudithook(channel.refuse_files)
    report(ready=True)
    start_alarm()
    try:
        first = channel.receive()
    except (ChannelClosed, Violation):
        report(broken="the program ended while it was loaded")
        return
    names = first.get("names")
    if "broken" in first or not isinstance(names, dict):
        report(broken=str(first.get("broken"))[:300])
        return
    for index in suite["run"]:
        start_alarm()
        report(**run_test(index, suite, names, channel))


def run_test(
    index: int, suite: dict[str, Any], names: dict[str, Any], channel: TestChannel
) -> dict[str, Any]:
    """Run one test in a namespace of its own and return its result as a message."""
    start = time.monotonic()
    result: dict[str, Any] = {"test": index, "passed": False}
    test = suite["tests"][index]
    try:
        execute(suite["setup"], test, names, suite["entry_point"], channel)
        result["passed"] = not (channel.violation or channel.unsupported)
    except ChannelClosed:
        result["reason"] = "the program ended"
    except AssertionError as error:
        message = error_text(error) or test.strip().splitlines()[0]
        result["reason"] = f"failed: {message}"[:300]
    except BaseException as error:  # SystemExit of a test must not end this process
        result["reason"] = f"{type(error).__name__}: {error_text(error)}"[:300]
    if channel.violation:
        result["reason"] = channel.violation
    elif channel.unsupported:
        result["unsupported"] = channel.unsupported
    result["seconds"] = time.monotonic() - start
    return result


def execute(
    setup: str, test: str, names: dict[str, Any], entry_point: str, channel: TestChannel
) -> None:
    """Execute setup and test. Raises what the test raises.

    Args:
        names: the program's global names, as program_runner.describe() writes them.
        entry_point: the function that the test is about, or "" if it is not known.
    """
    tree = ast.parse(setup + "\n" + test)
    channel.start_test(tree)
    standard, program_names = bind_names(tree, names, entry_point)
    functions = vars(builtins) | channel.lengths.functions()
    namespace = {"__name__": TEST_MODULE, "__builtins__": functions} | standard
    namespace[CHECKED_LOOP] = channel.lengths.loop
    for name in program_names:
        if kind_of(names[name]) == "exception":
            channel.errors[name] = exception_class(name, names[name]["value"])
            namespace[name] = channel.errors[name]
        else:
            namespace[name] = channel.decode(names[name])
        if is_class_name(name) and name != entry_point and type(namespace[name]) is Opaque:
            channel.names_class = True
            object.__setattr__(namespace[name], "_handle_is_class", True)
    check_loops(tree)
    code = compile(tree, "test", "exec")
    channel.namespace = namespace
    exec(code, namespace)


def is_class_name(name: str) -> bool:
    """Return whether a name is written as names of classes are.

    Only the test says so: a program can define `class f` where a test expects a function.
    """
    return name.lstrip("_")[:1].isupper() and "_" not in name.lstrip("_")


def exception_class(name: str, class_names: list[str]) -> type[BaseException]:
    """Return an exception class with this name and the built-in base of the program's class."""
    for base_name in class_names:
        base = vars(builtins).get(base_name)
        if isinstance(base, type) and issubclass(base, Exception) and base_name not in ENDS:
            return type(name, (base,), {})
    return type(name, (Exception,), {})
