"""Runs the tests against a program in another sandbox, known by its replies only.

Started as `python -I -S -c "...; test_runner.main()" SETTINGS`. SETTINGS is JSON with the limits
and the file descriptors of the tests, of the connection to the program and of the pipe for results.
"""

import ast
import builtins
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import plain
from .channel import Channel, ChannelClosed, Unsupported, error_text
from .handles import (
    ClassHandle,
    FunctionHandle,
    Handle,
    IteratorHandle,
    ObjectHandle,
    OpaqueHandle,
    Violation,
)
from .limits import apply_limits
from .test_names import bind_names, kind_of
from .test_source import CHECKED_ZIP, TestSource, checked_zip

TEST_MODULE = "__tests__"


class TestChannel(Channel):
    """The connection to the program. The test runner believes nothing but well-formed replies.

    It does one thing for the program: call functions that a test has passed as arguments.

    Attributes:
        violation: why the test has failed whatever it asserts, or "".
        classes: names of the program's classes that the test uses as classes.
        is_structure: the test reads attributes of the program's objects.
        errors: the program's exception classes that the test can catch, by name.
        class_sources: the source of the test's own classes, by name.
        namespace: the global names of the test.
    """

    __test__ = False

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.functions: list[Any] = []  # the tests' functions that the program knows by number
        self.handles: dict[int, Handle] = {}
        self.instances: dict[int, Any] = {}  # instances of the tests' classes, by number
        self.instance_numbers: dict[int, int] = {}
        self.in_message: set[int] = set()
        self.start_test({})

    def start_test(self, class_sources: dict[str, str]) -> None:
        """Forget what belongs to the last test."""
        self.violation = ""
        self.classes: set[str] = set()
        self.is_structure = False
        self.errors: dict[str, type[BaseException]] = {}
        self.class_sources = class_sources
        self.defined: set[str] = set()  # the classes that the program has got
        self.namespace: dict[str, Any] = {}
        self.handles.clear()

    def violate(self, reason: str) -> None:
        """Fail the test. Raises Violation."""
        self.violation = self.violation or reason
        raise Violation(self.violation)

    # ---- messages

    def send(self, message: dict[str, Any]) -> None:
        self.in_message.clear()
        super().send(message)

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        if self.violation:
            raise Violation(self.violation)
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and self.connection.recv(1, socket.MSG_PEEK):
            self.violate("the program wrote to the channel without being asked")
        return super().ask(operation, *arguments, **keywords)

    def read_reply(
        self, message: dict[str, Any], request_id: str, arguments: tuple[Any, ...]
    ) -> Any:
        if message.get("reply") != request_id:
            self.violate("the program wrote to the channel without being asked")
        return super().read_reply(message, request_id, arguments)

    def receive(self) -> dict[str, Any]:
        try:
            return super().receive()
        except (ValueError, RecursionError, MemoryError):
            self.violate("the program sent a malformed message")
            raise

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        function, *rest = arguments
        if operation != "call" or not any(function is passed for passed in self.functions):
            raise ValueError("the test runner only calls functions that a test has passed")
        return function(*rest)

    # ---- values

    def encode(self, value: Any) -> Any:
        if issubclass(type(value), Handle):  # isinstance() would ask an ObjectHandle for its class
            return plain.tagged("object", value._number)
        return super().encode(value)

    def encode_other(self, value: Any) -> Any:
        if type(value).__name__ in self.class_sources and type(value).__module__ == TEST_MODULE:
            return self.encode_instance(value)
        kind = plain.plain_base(value)
        if kind is not None:
            return plain.write(value, kind, self.encode)
        if not callable(value):
            raise Unsupported(f"a {type(value).__name__} of the test cannot be sent to the program")
        for number, function in enumerate(self.functions):
            if function is value:
                return plain.tagged("function", number)
        self.functions.append(value)
        return plain.tagged("function", len(self.functions) - 1)

    def encode_instance(self, value: Any) -> Any:
        name = type(value).__name__
        if not hasattr(value, "__dict__"):
            raise Unsupported(f"a {name} of the test has no __dict__ to send to the program")
        self.define_class(name)
        number = self.instance_numbers.get(id(value))
        if number is None:
            number = len(self.instance_numbers)
            self.instance_numbers[id(value)] = number
            self.instances[number] = value
        data = plain.tagged("instance", number) | {"class": name}
        if number not in self.in_message:
            self.in_message.add(number)
            attributes = list(vars(value).items())
            data["attributes"] = [[key, self.encode(item)] for key, item in attributes]
        return data

    def define_class(self, name: str) -> None:
        """Give the program the source of one of the test's classes, once."""
        if name not in self.defined:
            self.defined.add(name)
            in_message = set(self.in_message)  # a request within the encoding of another one
            self.ask("define", name, self.class_sources[name])
            self.in_message = in_message

    def decode(self, data: Any) -> Any:
        try:
            return super().decode(data)
        except Exception:  # whatever is wrong with the data, the program has sent it
            self.violate("the program sent a malformed value")

    def decode_other(self, kind: str, data: dict[str, Any]) -> Any:
        number = data["value"]
        if kind == "function":
            return self.functions[number]
        if kind == "instance":
            return self.decode_instance(data)
        if type(number) is not int:
            raise ValueError("a handle needs a number")
        if kind == "coroutine":
            return self.run_coroutine(IteratorHandle(number, self.ask, self.violate))
        if number not in self.handles:
            handle = self.make_handle(kind, data)
            if not isinstance(handle, Handle):  # the plain content of an object
                return handle
            self.handles[number] = handle
        return self.handles[number]

    def make_handle(self, kind: str, data: dict[str, Any]) -> Any:
        common = (data["value"], self.ask, self.violate)
        if kind == "callable":
            return FunctionHandle(*common)
        if kind == "iterator":
            return IteratorHandle(*common)
        if kind not in ("class", "object"):
            raise ValueError(f"no value of kind {kind} is expected here")
        if not self.classes.isdisjoint(data["classes"]):
            return ClassHandle(*common) if kind == "class" else ObjectHandle(*common)
        if kind == "class":
            return FunctionHandle(*common)
        if "content" in data:
            return self.decode(data["content"])
        return OpaqueHandle(*common, self.is_structure)

    async def run_coroutine(self, handle: Handle) -> Any:
        return self.ask("run_coroutine", handle)

    def decode_instance(self, data: dict[str, Any]) -> Any:
        number = data["value"]
        if number not in self.instances:
            if number >= 0:
                raise ValueError("instances made by the program have negative numbers")
            kind = self.test_class(data["class"])
            value = object.__new__(kind)
            self.instances[number] = value
            self.instance_numbers[id(value)] = number
        value = self.instances[number]
        if "attributes" in data:
            attributes = {name: self.decode(item) for name, item in data["attributes"]}
            for name in attributes:
                if hasattr(type(value).__dict__.get(name), "__get__"):
                    self.violate(f"the program replaced the method {name} of the test's class")
            vars(value).clear()
            vars(value).update(attributes)
        return value

    def test_class(self, name: str) -> type:
        """Return a class of the test by name. Raises LookupError or ValueError."""
        if name not in self.defined:
            raise LookupError(name)
        kind = self.namespace[name]
        if not isinstance(kind, type) or kind.__module__ != TEST_MODULE:
            raise ValueError(f"{name} is no class of the test")
        return kind

    # ---- exceptions

    def decode_error(self, data: Any) -> BaseException:
        names, text = data
        for name in names:
            if name in self.errors:
                return self.errors[name](str(text))
        return super().decode_error(data)


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
        result["passed"] = not channel.violation
    except ChannelClosed:
        result["reason"] = "the program ended"
    except Unsupported as error:
        result["unsupported"] = str(error)
    except AssertionError as error:
        message = error_text(error) or test.strip().splitlines()[0]
        result["reason"] = f"failed: {message}"[:300]
    except BaseException as error:  # SystemExit of a test must not end this process
        result["reason"] = f"{type(error).__name__}: {error_text(error)}"[:300]
    if channel.violation:
        result["reason"] = channel.violation
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
    sources = class_sources(tree)
    channel.start_test(sources)
    standard, program_names = bind_names(tree, names, entry_point)
    source = TestSource(tree, program_names)
    channel.is_structure = source.reads_structure()
    for name in program_names:
        if kind_of(names[name]) == "class" and is_used_as_class(name, source, entry_point):
            channel.classes.add(str(names[name]["classes"][0]))
    namespace: dict[str, Any] = {"__name__": TEST_MODULE, CHECKED_ZIP: checked_zip} | standard
    for name in program_names:
        if kind_of(names[name]) == "exception":
            channel.errors[name] = exception_class(name, names[name]["value"])
            namespace[name] = channel.errors[name]
        else:
            namespace[name] = channel.decode(names[name])
    if not source.base_names().isdisjoint(program_names - channel.errors.keys()):
        raise Unsupported("a class of the test derives from a class of the program")
    channel.namespace = namespace
    for name in class_sources(ast.parse(setup)):  # part of the task: the program may use them too
        channel.define_class(name)
    source.check_zips()
    exec(compile(tree, "test", "exec"), namespace)


def is_used_as_class(name: str, source: TestSource, entry_point: str) -> bool:
    """Return whether a test uses a class of the program as a class, and not as a function.

    A program can define `class f` where the test expects a function. So a name counts as a class if
    the test's source shows it, or if it is written as class names are and is not the entry point.
    """
    is_camel_case = name.lstrip("_")[:1].isupper() and "_" not in name.lstrip("_")
    return source.uses_as_class(name) or (is_camel_case and name != entry_point)


def class_sources(tree: ast.Module) -> dict[str, str]:
    """Return the source of each top-level class, after the imports and the classes before it."""
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    classes: dict[str, ast.ClassDef] = {}
    sources: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        base_names = [base.id for base in node.bases if isinstance(base, ast.Name)]
        bases = [classes[name] for name in base_names if name in classes]
        classes[node.name] = node
        body: list[ast.stmt] = [*imports, *bases, node]
        sources[node.name] = ast.unparse(ast.Module(body, []))
    return sources


def exception_class(name: str, class_names: list[str]) -> type[BaseException]:
    """Return an exception class with this name and the built-in base of the program's class."""
    for base_name in class_names:
        base = vars(builtins).get(base_name)
        if isinstance(base, type) and issubclass(base, Exception):
            return type(name, (base,), {})
    return type(name, (Exception,), {})
