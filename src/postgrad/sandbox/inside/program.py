"""The judged side: run the program, with its input and output (`main`), or load it and do what the tests ask (`serve`).

Started as: python -I -S -c "...; program.main()" SETTINGS, where SETTINGS is JSON with the limits, the number of the file that holds
the program and the number of the pipe that says when the clock may start.
"""

import builtins
import json
import operator
import os
import socket
import sys
import types
from typing import Any

from .confine import confine
from .wire import Gone, Unsupported, Wire, text_of

OPERATORS = (
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "index",
    "neg",
    "pos",
    "invert",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
)
OPERATORS += (
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
)
OPERATIONS = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    **{
        f.__name__: f
        for f in (
            len,
            iter,
            next,
            str,
            repr,
            hash,
            bool,
            int,
            float,
            complex,
            dir,
            reversed,
            abs,
            round,
            format,
        )
    },
    **{name: getattr(operator, name) for name in OPERATORS},
}


class ProgramWire(Wire):
    """Does whatever the tests ask; its own objects travel as numbers, the tests' functions become callables here."""

    def do(self, what: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        return OPERATIONS[what](*arguments, **named)

    def encode_other(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Borrowed):
            return {"type": "function", "value": value.number}
        if isinstance(value, types.ModuleType):
            return {"type": "module", "value": value.__name__}
        return {"type": "object", "value": self.keep(value)}

    def decode_other(self, kind: str, value: Any) -> Any:
        return self.kept[value] if kind == "object" else Borrowed(self, value)


class Borrowed:
    """A function of the tests, given as an argument."""

    def __init__(self, wire: ProgramWire, number: int) -> None:
        self.wire, self.number = wire, number

    def __call__(self, *arguments: Any) -> Any:
        return self.wire.ask("call", self, *arguments)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.argv = ["program.py"]
    with os.fdopen(settings["program"], "rb") as file:
        source = file.read().decode("utf-8", "surrogatepass")
    confine(settings)
    os.write(settings["ready"], b"r")
    os.close(settings["ready"])
    builtins.exit = builtins.quit = sys.exit  # what `site` would have set
    if settings["peer"] is None:
        run(source)
    else:
        serve(source, ProgramWire(socket.socket(fileno=settings["peer"])))


def run(source: str) -> None:
    """As `python program.py` would."""
    sys.setrecursionlimit(10_000)
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    exec(compile(source, "program.py", "exec"), main_module.__dict__)


def serve(source: str, wire: ProgramWire) -> None:
    """Load the program, say which names it has, then do what is asked until the line closes."""
    sys.setrecursionlimit(10_000)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too
        wire.send({"broken": f"{type(error).__name__}: {text_of(error)}"})
        return
    names = {
        name: describe(value, wire)
        for name, value in list(vars(module).items())
        if not name.startswith("__")
    }
    try:
        wire.send({"names": names})
        while True:
            wire.serve(wire.receive())
    except (Gone, Unsupported):
        pass
    finally:
        os._exit(0)  # threads of the program are no reason to stay


def describe(value: Any, wire: ProgramWire) -> Any:
    """A name of the program for the tests: what it imported by module and name, plain data by value, the rest by number."""
    origin, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(origin, str) and isinstance(name, str) and origin in sys.stdlib_module_names:
        return {"type": "imported", "value": [origin, name]}
    try:
        return wire.encode(value)
    except Exception:  # a value that cannot be looked at: its name is missing then
        return {"type": "object", "value": wire.keep(value)}
