"""Programs for the sandbox, read from files: right ones, and cheats.

- programs.jsonl: right programs with the tests that they pass (`unsupported`: the numbers of those
  that the sandbox cannot run), and fakes, which must pass none of FAKE_TESTS.
- cheats.jsonl: each cheat must be `refused`: it fails its test ("fails"), or the test is
  "unsupported". The `honest` program passes the same test, so that no test here is one that nothing
  can pass; it is empty where a test is unsupported whatever the program is.

A line $LIAR, $EVIL or $CHANNEL of a program stands for the text below.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent

# An object that says yes to everything: every operator, every conversion, every method.
LIAR = """
class LyingText(str):
    def __eq__(self, other): return True
    def __hash__(self): return 41
class LyingNumber(int):
    def __eq__(self, other): return True
    def __hash__(self): return 41
class Liar:
    def __init__(self, *_, **__): pass
    def yes(self, *_, **__): return True
    def itself(self, *_, **__): return self
    def zero(self, *_, **__): return 0
    def nothing(self, *_, **__): return iter(())
    def __getattr__(self, name): return self.yes
    def __hash__(self): return hash(41)
    def __str__(self): return LyingText("7")
    def __repr__(self): return LyingText("7")
    def __format__(self, specification): return LyingText("7")
    def __int__(self): return LyingNumber(7)
    def __float__(self): return 7.0
    def __index__(self): return LyingNumber(7)
    def __len__(self): return 3
    def __enter__(self): return self
    def __exit__(self, *_): return True
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = __bool__ = yes
    def __ne__(self, other): return False
    __add__ = __radd__ = __mul__ = __rmul__ = __abs__ = __neg__ = __pos__ = __round__ = itself
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __call__ = __getitem__ = itself
    __sub__ = __rsub__ = __mod__ = __xor__ = zero
    __divmod__ = lambda self, other: (1, 0)
    __iter__ = __reversed__ = nothing
    __next__ = lambda self: 7
"""
EVIL = """
class Evil(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __bool__(self): return True
    def __sub__(self, other): return self
    __rsub__ = __abs__ = __add__ = lambda self, *other: self
    __hash__ = None
class Plain:
    pass
for name in ("__eq__", "__lt__", "__gt__", "__sub__", "__abs__", "__float__", "__contains__"):
    setattr(Plain, name, lambda self, *other: True if name != "__sub__" else self)
"""
# Writes on the socket to the test runner.
CHANNEL = """
import gc, json, os, socket, sys, threading
def find_socket():
    for found in gc.get_objects():
        if type(found) is socket.socket:
            return found
def find_channel():
    for found in gc.get_objects():
        if type(found).__name__ == "ProgramChannel":
            return found
def write(*messages):
    for message in messages:
        find_socket().sendall(json.dumps(message).encode() + b"\\n")
"""
TEXTS = {"$LIAR\n": LIAR, "$EVIL\n": EVIL, "$CHANNEL\n": CHANNEL}

FAKE_TESTS = [
    "assert f(1) == 41",
    "assert abs(f(1) - 41) < 1e-6",
    "assert f(1) > 40 and f(1) < 42",
    "assert math.isclose(f(1), 41) and math.fabs(f(1) - 41) < 1e-6",
    "assert sorted([f(1)]) == [41] and isinstance(f(1), int)",
    "assert f(1) in (41, 42) and str(f(1)) == '41'",
]


class Cheat(NamedTuple):
    """One row of cheats.jsonl."""

    group: str
    name: str
    program: str
    test: str
    honest: str = ""
    refused: str = "fails"
    entry_point: str = ""
    setup: str = ""


def read_rows(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
    for row in rows:
        for mark, text in TEXTS.items():
            row["program"] = row["program"].replace(mark, text)
    return rows


CHEATS = [Cheat(**row) for row in read_rows("cheats.jsonl")]
_PROGRAMS = read_rows("programs.jsonl")
FAKES = {row["name"]: row["program"] for row in _PROGRAMS if row["kind"] == "fake"}
# name -> (program, tests, numbers of the unsupported tests)
RIGHT = {
    row["name"]: (row["program"], row["tests"], set(row.get("unsupported", ())))
    for row in _PROGRAMS
    if row["kind"] == "right"
}
