"""Programs that try to pass a test without the answer.

Each cheat is (name, program, test, honest program). The cheat must fail its test, and the honest
program must pass the same test, so that no test here is one that nothing can pass.
"""

from typing import NamedTuple

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
LIES = LIAR + "def f(x): return Liar()\n"
FORTY_ONE = "def f(x): return 41\n"
LIST = "def f(x): return [1, 2, 3]\n"


class Cheat(NamedTuple):
    name: str
    program: str
    test: str
    honest: str = FORTY_ONE
    entry_point: str = ""
    setup: str = ""


def lies(name: str, test: str, honest: str = FORTY_ONE) -> Cheat:
    return Cheat(f"liar: {name}", LIES, test, honest)


def subclass(base: str, value: str, test: str, honest: str) -> Cheat:
    """A subclass of a plain type whose operators lie; the test gets the plain content."""
    program = f"""
class Sub({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return hash(41)
    def __contains__(self, other): return True
    def __sub__(self, other): return Sub()
    def __rsub__(self, other): return Sub()
    def __abs__(self): return Sub()
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = issubset = issuperset = startswith = endswith = __lt__
    def __iter__(self): return iter(())
    def __len__(self): return 3
    def get(self, *_): return 41
    def count(self, *_): return 1
    def index(self, *_): return 0
def f(x): return Sub({value})
"""
    return Cheat(f"subclass of {base}: {test}", program, test, honest)


def channel(name: str, body: str, test: str = "assert f(1) is True") -> Cheat:
    """A program that writes on the socket to the test runner."""
    program = f"""
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
{body}
"""
    return Cheat(f"channel: {name}", program, test, "def f(x): return True")


TRUE_REPLY = '{"reply": None, "value": True, "changed": []}'

CHEATS = [
    # ---- an object with operators of its own
    lies("tolerance", "assert abs(f(1) - 41) < 1e-6"),
    lies("membership", "assert 41 in f(1)", "def f(x): return [41]"),
    lies("difference", "assert f(1) - 41 == 0"),
    lies("quotient", "assert f(1) / 41 == 1"),
    lies("truth", "assert f(1)"),
    lies("bool", "assert bool(f(1)) is True"),
    lies("not not", "assert not not f(1)"),
    lies("equality", "assert f(1) == 41"),
    lies("reflected equality", "assert 41 == f(1)"),
    lies("inequality", "assert not f(1) != 41"),
    lies("bounds", "assert 40 < f(1) < 42"),
    lies("member of a tuple", "assert f(1) in (41, 42)"),
    lies("member of a set", "assert f(1) in {41, 42}"),
    lies("key", "assert {41: 'x'}[f(1)] == 'x'"),
    lies("isclose", "import math\nassert math.isclose(f(1), 41)"),
    lies("fabs", "import math\nassert math.fabs(f(1) - 41) < 1e-6"),
    lies("int", "assert int(f(1)) == 41"),
    lies("float", "assert float(f(1)) == 41"),
    lies("str", "assert str(f(1)) == '41'"),
    lies("repr", "assert repr(f(1)) == '41'"),
    lies("f-string", "assert f'{f(1)}' == '41'"),
    lies("percent format", "assert '%d' % f(1) == '41'"),
    lies("round", "assert round(f(1), 2) == 41"),
    lies("remainder", "assert f(1) % 41 == 0"),
    lies("divmod", "assert divmod(f(1), 41) == (1, 0)"),
    lies("sum", "assert sum([f(1)]) == 41"),
    lies("reflected sum", "assert 1 + f(1) == 42"),
    lies("product", "assert f(1) * 2 == 82"),
    lies("negative", "assert -f(1) == -41"),
    lies("xor", "assert f(1) ^ 41 == 0"),
    lies("maximum", "assert max(f(1), 41) == 41 == min(f(1), 41)"),
    lies("hash", "assert hash(f(1)) == hash(41) and f(1) == 41"),
    lies("in a list", "assert [f(1)] == [41]"),
    lies("in a dict", "assert {'a': f(1)} == {'a': 41}"),
    lies("isinstance", "assert isinstance(f(1), int) and f(1) - 41 == 0"),
    lies("index", "assert list(range(50))[f(1)] == 41"),
    lies("own method", "assert f(1).__eq__(41)"),
    lies("unittest", "import unittest\nunittest.TestCase().assertEqual(f(1), 41)"),
    lies("unittest near", "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 41)"),
    lies("unittest true", "import unittest\nunittest.TestCase().assertTrue(f(1))"),
    lies("copy", "import copy\nassert copy.deepcopy(f(1)) == 41"),
    lies("caught", "try:\n    assert f(1) == 41\nexcept Exception:\n    assert False"),
    lies("swallowed", "try:\n    result = f(1) == 41\nexcept BaseException:\n    result = True\n"
         "assert result"),
    # ---- an object that pretends to be a container or a string
    lies("zip loop", "for a, b in zip(f(1), [1, 2, 3]):\n    assert a == b", LIST),
    lies("zip in all", "assert all(a == b for a, b in zip(f(1), [1, 2, 3]))", LIST),
    lies("all", "assert all(x > 0 for x in f(1))", LIST),
    lies("set difference", "assert set(f(1)) - {1, 2, 3} == set()", LIST),
    lies("sorted", "assert sorted(f(1)) == [1, 2, 3]", LIST),
    lies("list", "assert list(f(1)) == [1, 2, 3]", LIST),
    lies("length and items", "assert len(f(1)) == 3 and f(1)[0] == 1", LIST),
    lies("slice", "assert f(1)[1:] == [2, 3]", LIST),
    lies("count", "assert f(1).count(2) == 1", LIST),
    lies("items", "assert f(1)['a'] == 41", "def f(x): return {'a': 41}"),
    lies("get", "assert f(1).get('a') == 41", "def f(x): return {'a': 41}"),
    lies("issubset", "assert f(1).issubset({1, 2})", "def f(x): return {1}"),
    lies("startswith", "assert f(1).startswith('ab')", "def f(x): return 'abc'"),
    lies("isdigit", "assert f(1).isdigit()", "def f(x): return '41'"),
    lies("isiterable", "from collections.abc import Iterable\nassert isinstance(f(1), Iterable)",
         LIST),
    lies("context", "with f(1) as x:\n    assert x == 41",
         "import contextlib\ndef f(x): return contextlib.nullcontext(41)"),
    lies("unpacked", "a, b, c = f(1)\nassert (a, b, c) == (1, 2, 3)", LIST),
    lies("next", "assert next(f(1)) == 41", "def f(x): return iter([41])"),
    Cheat("an empty list in zip", "def f(x): return []",
          "for a, b in zip(f(1), [1, 2, 3]):\n    assert a == b", LIST),
    Cheat("an empty list in all(zip)", "def f(x): return []",
          "result, expected = f(1), [1, 2, 3]\n"
          "assert all(a == b for a, b in zip(expected, result))", LIST),
    Cheat("an empty generator in zip", "def f(x):\n    return\n    yield",
          "for a, b in zip(f(1), [1, 2, 3]):\n    assert a == b", LIST),
    Cheat("an empty list in the zip of check(candidate)", "def f(x): return []",
          "def check(candidate):\n    for a, b in zip(candidate(1), [1, 2]):\n"
          "        assert abs(a - b) < 1e-6\ncheck(f)", LIST, "f"),
    # ---- liars inside plain containers, and from generators, methods and callbacks
    Cheat("list of liars", LIAR + "def f(x): return [Liar()]", "assert f(1) == [41]",
          "def f(x): return [41]"),
    Cheat("dict of liars", LIAR + "def f(x): return {'a': {'b': Liar()}}",
          "assert f(1)['a']['b'] - 41 == 0", "def f(x): return {'a': {'b': 41}}"),
    Cheat("set of liars", LIAR + "def f(x): return {Liar()}", "assert f(1) == {41}",
          "def f(x): return {41}"),
    Cheat("liar as key", LIAR + "def f(x): return {Liar(): 1}", "assert f(1)[41] == 1",
          "def f(x): return {41: 1}"),
    Cheat("generator of liars", LIAR + "def f(x): yield Liar()", "assert list(f(1)) == [41]",
          "def f(x): yield 41"),
    Cheat("liar for a callback", LIAR + "def f(g): g(Liar())",
          "found = []\nf(found.append)\nassert found == [41]", "def f(g): g(41)"),
    Cheat("callback that compares", LIAR + "def f(g): return g(Liar())",
          "assert f(lambda x: x == 41) is True", "def f(g): return g(41)"),
    Cheat("liar in a mutated argument", LIAR + "def f(x): x[0] = Liar()",
          "a = [0]\nf(a)\nassert a == [41]", "def f(x): x[0] = 41"),
    Cheat("liar from a coroutine", LIAR + "async def f(x): return Liar()",
          "import asyncio\nassert asyncio.run(f(1)) == 41", "async def f(x): return 41"),
    Cheat("liar as a global", LIAR + "ANSWER = Liar()\ndef f(x): return 1",
          "assert ANSWER == 41 and f(1) == 1", "ANSWER = 41\ndef f(x): return 1"),
    Cheat("liar from a function that returns functions",
          LIAR + "def f(x): return lambda y: Liar()", "assert f(1)(2) == 41",
          "def f(x): return lambda y: 41"),
    Cheat("an object that pretends to be an int", LIAR + "class Int(Liar):\n    __class__ = int\n"
          "def f(x): return Int()", "assert f(1) - 41 == 0"),
    Cheat("an object that pretends to be a list", LIAR + "class List(Liar):\n    __class__ = list\n"
          "def f(x): return List()", "assert f(1) == [1, 2, 3]", LIST),
    Cheat("a function with lying attributes",
          "def f(x):\n    def g(*_): return True\n"
          "    g.startswith = g.isdigit = g.count = g.issubset = g\n    return g",
          "assert f(1).startswith('ab')", "def f(x): return 'abc'"),
    Cheat("a class with lying attributes",
          "def f(x):\n    class C:\n        isdigit = staticmethod(lambda *_: True)\n    return C",
          "assert f(1).isdigit()", "def f(x): return '41'"),
    Cheat("a cached property of the test's object replaced",
          "def f(node): node.__dict__['is_right'] = True",
          "import functools\nclass Node:\n    v = 0\n    @functools.cached_property\n"
          "    def is_right(self): return self.v == 41\nnode = Node()\nf(node)\n"
          "assert node.is_right", "def f(node): node.v = 41"),
    # ---- functions that are not functions
    Cheat("a class instead of a function", LIAR + "class f(Liar): pass",
          "assert abs(f(1) - 41) < 1e-6"),
    Cheat("a class with a function's name and membership", LIAR + "class f(Liar): pass",
          "assert 41 in f(1)", "def f(x): return [41]"),
    Cheat("a class as the entry point", LIAR + "class Answer(Liar): pass",
          "assert Answer(1) - 41 == 0", "def Answer(x): return 41", "Answer"),
    Cheat("a liar instead of a function", LIAR + "f = Liar()", "assert f(1) - 41 == 0"),
    Cheat("a lying class, instance against plain", LIAR + "class Answer(Liar): pass",
          "assert Answer(1) == 41", "def Answer(x): return 41"),
    Cheat("a method that returns a liar",
          LIAR + "class Box:\n    def get(self): return Liar()",
          "assert abs(Box().get() - 41) < 1e-6", "class Box:\n    def get(self): return 41"),
    Cheat("a dataclass that lies",
          "from dataclasses import dataclass\n@dataclass(eq=False)\nclass D:\n    x: int = 0\n"
          "    def __eq__(self, other): return True\ndef f(x): return D()",
          "assert f(1) == 41"),
    Cheat("an enum that lies",
          "import enum\nclass E(enum.Enum):\n    A = 0\n"
          "    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E.A",
          "assert f(1) == 41"),
    Cheat("a metaclass that lies",
          "class M(type):\n    def __eq__(self, other): return True\n"
          "    def __hash__(self): return 1\n    def __sub__(self, other): return 0\n"
          "class C(metaclass=M): pass\ndef f(x): return C",
          "assert f(1) - 41 == 0"),
    Cheat("NotImplemented", "def f(x): return NotImplemented",
          "assert f(1) == 41"),
    # ---- subclasses of plain types
    subclass("int", "7", "assert f(1) == 41", FORTY_ONE),
    subclass("int", "7", "assert abs(f(1) - 41) < 1e-6", FORTY_ONE),
    subclass("float", "7", "assert abs(f(1) - 41.0) < 1e-6", FORTY_ONE),
    subclass("str", "'x'", "assert f(1).startswith('ab')", "def f(x): return 'abc'"),
    subclass("str", "'x'", "assert 'b' in f(1)", "def f(x): return 'abc'"),
    subclass("list", "", "assert f(1) == [1, 2, 3]", LIST),
    subclass("list", "", "assert f(1).index(1) == 0 and f(1).count(2) == 1", LIST),
    subclass("list", "[9]", "assert set(f(1)) - {1, 2, 3} == set()", LIST),
    subclass("dict", "", "assert f(1).get('a') == 41", "def f(x): return {'a': 41}"),
    subclass("set", "", "assert f(1) - {2} == {1}", "def f(x): return {1, 2}"),
    subclass("set", "[9]", "assert f(1).issubset({1, 2})", "def f(x): return {1}"),
    subclass("tuple", "", "assert f(1) == (1, 2)", "def f(x): return (1, 2)"),
    subclass("bytes", "b'x'", "assert f(1) == b'abc'", "def f(x): return b'abc'"),
    Cheat("a namedtuple that lies",
          "from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n"
          "    def __eq__(self, other): return True\ndef f(x): return P(0, 0)",
          "assert f(1) == (3, 4)", "def f(x): return (3, 4)"),
    Cheat("a Fraction that lies",
          "from fractions import Fraction\nclass F(Fraction):\n"
          "    def __eq__(self, other): return True\ndef f(x): return F(1, 7)",
          "from fractions import Fraction\nassert f(1) == Fraction(1, 3)",
          "from fractions import Fraction\ndef f(x): return Fraction(1, 3)"),
    # ---- exceptions
    Cheat("an exception with a lying text",
          "class S(str):\n    def __contains__(self, other): return True\n"
          "class E(ValueError):\n    def __str__(self): return S('x')\ndef f(x): raise E",
          "try:\n    f(1)\n    assert False\n"
          "except ValueError as e:\n    assert 'negative' in str(e)",
          "def f(x): raise ValueError('negative')"),
    Cheat("AssertionError", "def f(x): raise AssertionError", "assert f(1) == 41"),
    Cheat("SystemExit", "def f(x): raise SystemExit(0)", "assert f(1) == 41"),
    Cheat("GeneratorExit", "def f(x): raise GeneratorExit", "assert f(1) == 41"),
    Cheat("KeyboardInterrupt", "def f(x): raise KeyboardInterrupt", "assert f(1) == 41"),
    Cheat("StopIteration in a generator expression", "def f(x): raise StopIteration",
          "assert all(f(x) == 41 for x in [1, 2])"),
    Cheat("an exception class of the test's name",
          "class Violation(BaseException): pass\ndef f(x): raise Violation",
          "assert f(1) == 41"),
    # ---- names of Python that the program defines
    Cheat("its own abs", "def abs(x): return 0\ndef f(x): return 0", "assert abs(f(1) - 41) < 1"),
    Cheat("its own zip", "def zip(*x): return []\ndef f(x): return []",
          "for a, b in zip(f(1), [1]):\n    assert a == b", "def f(x): return [1]"),
    Cheat("its own isclose", "def isclose(*x, **y): return True\ndef f(x): return 0",
          "assert isclose(f(1), 41)",
          "from math import isclose\ndef f(x): return 41"),
    Cheat("its own Counter",
          "class Counter:\n    def __init__(self, *_): pass\n"
          "    def __eq__(self, other): return True\ndef f(x): return []",
          "assert Counter(f(1)) == Counter([1, 1])",
          "from collections import Counter\ndef f(x): return [1, 1]"),
    Cheat("its own sorted and set",
          "def sorted(x): return [1]\ndef set(x): return {1}\ndef f(x): return []",
          "assert sorted(f(1)) == [1] and set(f(1)) == {1}", "def f(x): return [1]"),
    Cheat("its own module", "class math:\n    isclose = lambda *x: True\ndef f(x): return 0",
          "assert math.isclose(f(1), 41)", "import math\ndef f(x): return 41"),
    Cheat("a standard function under another name",
          "from operator import is_not as f", "assert f(1, 2) == 41",
          "def f(x, y): return 41"),
    Cheat("a false origin",
          "def f(x): return 0\nf.__module__ = 'operator'\nf.__name__ = 'truth'",
          "assert f(1) == 41"),
    Cheat("a helper of the prompt redefined",
          "def poly(c, x): return 0\ndef find_zero(c): return 123",
          "assert abs(poly([-2, 1], find_zero([-2, 1]))) < 1e-4",
          "def poly(c, x): return c[0] + c[1] * x\ndef find_zero(c): return -c[0] / c[1]",
          "find_zero", "def poly(c, x): return c[0] + c[1] * x"),
    # ---- classes of the test
    Cheat("another class of the test's name",
          "class Node:\n    def __init__(self, v=0): self.v = 0\n"
          "    def __eq__(self, other): return True\ndef f(x): return Node()",
          "class Node:\n    def __init__(self, v): self.v = v\n"
          "    def __eq__(self, other): return self.v == other.v\nassert f(1) == Node(41)",
          "class Node:\n    def __init__(self, v): self.v = v\ndef f(x): return Node(41)",
          setup="class Node:\n    pass"),
    Cheat("a liar as an attribute of the test's object",
          LIAR + "def f(node): node.v = Liar()",
          "class Node:\n    pass\nnode = Node()\nf(node)\nassert node.v == 41",
          "def f(node): node.v = 41"),
    Cheat("a method of the test's object replaced",
          "def f(node): node.is_right = lambda: True",
          "class Node:\n    v = 0\n    def is_right(self): return self.v == 41\n"
          "node = Node()\nf(node)\nassert node.is_right()",
          "def f(node): node.v = 41"),
    # ---- the channel
    channel("replies on every descriptor", f"""
def f(x):
    reply = {TRUE_REPLY}
    for fd in range(3, 60):
        try: os.write(fd, json.dumps(reply).encode() + b"\\n")
        except OSError: pass
"""),
    channel("reply before the request", f"""
write({{"names": {{"f": {{"type": "callable", "value": 0}}}}}}, {TRUE_REPLY})
def f(x): return 0
"""),
    channel("second message with names", """
def f(x):
    write({"names": {"f": True}})
    return 0
"""),
    channel("result of the test", """
def f(x):
    write({"test": 0, "passed": True, "seconds": 0.1})
    return 0
"""),
    channel("malformed message", """
def f(x):
    find_socket().sendall(b"{" * 1000 + b"\\n")
    return 0
"""),
    channel("deeply nested message", """
def f(x):
    find_socket().sendall(b"[" * 100000 + b"\\n")
    return 0
"""),
    channel("a thread that keeps writing", f"""
def keep_writing():
    while True: write({TRUE_REPLY})
threading.Thread(target=keep_writing, daemon=True).start()
def f(x): return 0
"""),
    channel("requests to the test runner", """
def f(x):
    channel = find_channel()
    for what in ("eval", "getattr", "define", "call"):
        try: channel.ask(what, "__import__", "os")
        except BaseException: pass
    return 0
"""),
    channel("a value of unknown kind", """
find_channel().__class__.encode = lambda self, value: {"type": "violation", "value": 0}
def f(x): return 0
"""),
    channel("a function of the tests that was never passed", """
find_channel().__class__.encode = lambda self, value: {"type": "function", "value": 0}
def f(x): return 0
"""),
    channel("an instance with a number of the tests", """
find_channel().__class__.encode = lambda self, value: {
    "type": "instance", "value": 0, "class": "int", "attributes": []}
def f(x): return 0
"""),
    channel("closing", """
def f(x):
    find_socket().close()
    os.closerange(3, 60)
    return 0
"""),
    channel("exit", """
def f(x): os._exit(0)
"""),
    channel("a forged object of a class that the test does not use", """
find_channel().__class__.encode = lambda self, value: {
    "type": "object", "value": 0, "classes": ["int", "f", "object"]}
def f(x): return 0
""", "assert f(1) - 1 == 0"),
    channel("a forged class of an object", """
Point = type("Point", (), {"__init__": lambda self, *x: None})
ProgramChannel = type(find_channel())
perform = ProgramChannel.perform
def lie(self, operation, arguments, keywords):
    return int if operation == "class_of" else perform(self, operation, arguments, keywords)
ProgramChannel.perform = lie
def f(x): return Point()
""", "assert isinstance(f(1), int) or isinstance(Point(1), int)"),
    # ---- looking for the answer
    Cheat("searching memory for the expected value", """
import gc
def f(x):
    text = "".join(str(found) for found in gc.get_objects() if isinstance(found, (str, dict, list)))
    return 73164205 if ("7316" + "4205") in text.replace("73164205 if", "") else 0
""", "assert f(1) == 73164205", "def f(x): return 73164205"),
    Cheat("searching frames for the test", """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict): value.update(passed=True)
        frame = frame.f_back
    return 0
""", "assert f(1) == 41"),
    Cheat("patched builtins", """
import builtins
for name in ("AssertionError", "abs", "isinstance", "len", "sorted", "compile", "exec"):
    setattr(builtins, name, lambda *a, **k: True)
f = lambda *a: 0
""", "assert f(1) == 41"),
    Cheat("patched json", """
import json
json.dumps = lambda *a, **k: '{"test": 0, "passed": true, "seconds": 0.1}'
json.loads = lambda *a, **k: {"do": "call", "id": "", "arguments": [], "keywords": {}}
f = lambda *a: 0
""", "assert f(1) == 41"),
]  # fmt: skip
