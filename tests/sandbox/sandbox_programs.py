"""Programs for the sandbox: right ones with tests that they pass, and wrong ones that attack it.

cheats.py has more wrong ones: programs that only lie about their values.
"""

# name -> (program, tests)
RIGHT: dict[str, tuple[str, list[str]]] = {
    "sorts in place": (
        """
def f(x): x.sort()
""",
        [
            """
a = [3, 1, 2]
f(a)
assert a == [1, 2, 3]
"""
        ],
    ),
    "fills a dict": (
        """
def f(d): d['b'] = {1, 2}
""",
        [
            """
a = {}
f(a)
assert a == {'b': {1, 2}}
"""
        ],
    ),
    "swaps rows": (
        """
def f(m): m[0], m[1] = m[1], m[0]
""",
        [
            """
m = [[1], [2]]
f(m)
assert m == [[2], [1]]
"""
        ],
    ),
    "generator": (
        """
def f(n):
    yield from range(n)
""",
        ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6"],
    ),
    "takes a function": (
        """
def f(g, v): return [g(x) for x in v]
""",
        ["assert f(lambda x: x + 1, [1, 2]) == [2, 3]", "assert f(str, [1]) == ['1']"],
    ),
    "raises as asked": (
        """
def f(x):
    if x < 0: raise ValueError('negative')
    return x
""",
        [
            """
try:
    f(-1)
    assert False
except ValueError as e:
    assert 'neg' in str(e)
"""
        ],
    ),
    "class with state": (
        """
class S:
    def __init__(s): s.v = []
    def push(s, x): s.v.append(x)
    def __len__(s): return len(s.v)
""",
        [
            """
s = S()
s.push(4)
assert len(s) == 1 and s.v == [4] and isinstance(s, S)
"""
        ],
    ),
    "linked nodes": (
        """
class N:
    def __init__(s, v): s.v, s.l = v, None
def depth(n): return 0 if n is None else 1 + depth(n.l)
""",
        [
            """
r = N(1)
r.l = N(2)
assert depth(r) == 2
"""
        ],
    ),
    "all plain types": (
        """
def f(): return 1, 2.5, None, True, 'é', b'x', {3: frozenset([4])}, 1j, range(3), 10 ** 30
""",
        [
            "assert f()[:6] == (1, 2.5, None, True, 'é', b'x')",
            "assert f()[6:] == ({3: frozenset([4])}, 1j, range(3), 10 ** 30)",
            "assert isinstance(f()[0], int) and f()[3] is True",
        ],
    ),
    "subclasses of plain types": (
        """
from collections import Counter, deque, namedtuple
P = namedtuple('P', 'x y')
def f(): return Counter('aab'), deque([1]), P(1, 2)
""",
        [
            """
from collections import deque
assert f() == ({'a': 2, 'b': 1}, deque([1]), (1, 2))
"""
        ],
    ),
    "exact numbers": (
        """
from fractions import Fraction
from decimal import Decimal
def f(): return Fraction(1, 3), Decimal('0.10')
""",
        [
            """
from fractions import Fraction
assert f()[0] == Fraction(1, 3) and str(f()[1]) == '0.10'
"""
        ],
    ),
    "uses math": (
        """
import math
from math import isclose
def f(x): return x ** 0.5
""",
        ["assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)", "assert isclose(f(4), 2)"],
    ),
    "named as a builtin": (
        """
def sum(a, b): return a + b
""",
        ["assert sum(10, 15) == 25"],
    ),
    "operators of its own": (
        """
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __eq__(s, o): return s.x == o.x
    def __lt__(s, o): return s.x < o.x
""",
        ["assert V(1) + V(2) == V(3) and V(1) < V(2) and sorted([V(2), V(1)])[0] == V(1)"],
    ),
    "global state": (
        """
count = 0
def f():
    global count
    count += 1
    return count
""",
        ["assert f() == 1", "assert f() == 1"],
    ),
    "not a number": (
        """
def f(x): return float('nan')
""",
        ["assert f(1) != f(1)"],
    ),
    "deep recursion": (
        """
import sys
sys.setrecursionlimit(100000)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
""",
        ["assert f(5000) == 5000"],
    ),
    "thread": (
        """
import threading
def f():
    r = []
    t = threading.Thread(target=lambda: r.append(1))
    t.start()
    t.join()
    return r
""",
        ["assert f() == [1]"],
    ),
    "standard library": (
        """
import re, json, itertools, functools, heapq, bisect, random, string, datetime, typing
import dataclasses, asyncio
def f(): return 1
""",
        ["assert f() == 1"],
    ),
    "prints and exits as a script": (
        """
print('noise' * 1000)
if __name__ == '__main__':
    raise SystemExit
def f(): return 1
""",
        ["assert f() == 1"],
    ),
    "floats within a tolerance": (
        "def f(x): return x / 3",
        [
            "assert abs(f(1) - 0.333333) < 1e-5",
            "import math\nassert math.isclose(f(2), 2 / 3)",
            "assert round(f(2), 2) == 0.67 and f(3) == 1.0 and f(3).is_integer()",
        ],
    ),
    "sets and frozensets": (
        "def f(x): return set(x)",
        [
            "assert f([1, 2, 2]) == {1, 2} and f([1]) | {2} == {1, 2} and f([]) == set()",
            "assert f([1]).issubset({1, 2}) and 1 in f([1]) and len(f('aab')) == 2",
        ],
    ),
    "strings and their methods": (
        "def f(x): return x.upper()",
        ["assert f('ab').startswith('A') and f('ab')[::-1] == 'BA' and 'B' in f('ab')"],
    ),
    "iterators of the standard library": (
        """
import itertools
def squares(x): return map(lambda y: y * y, x)
def evens(x): return filter(lambda y: y % 2 == 0, x)
def pairs(x): return zip(x, x[1:])
def chained(x, y): return itertools.chain(x, y)
def forever():
    n = 0
    while True:
        yield n
        n += 1
""",
        [
            "assert list(squares([1, 2])) == [1, 4] and sum(evens([1, 2, 4])) == 6",
            "assert list(pairs([1, 2, 3])) == [(1, 2), (2, 3)]",
            "assert sorted(chained([2], [1])) == [1, 2] and max(chained([2], [1])) == 2",
            "from itertools import islice\nassert list(islice(forever(), 3)) == [0, 1, 2]",
            "assert [x for x, _ in zip(forever(), [9, 9])] == [0, 1]",
            "g = forever()\nassert next(g) == 0 and next(g) == 1",
        ],
    ),
    "dict views": (
        "def f(d): return d.keys(), d.values(), d.items()",
        [
            "k, v, i = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and list(i) == [('a', 1)]",
        ],
    ),
    "coroutine of a generator": (
        """
def echo():
    received = yield
    while True:
        received = yield received * 2
""",
        ["g = echo()\nnext(g)\nassert g.send(3) == 6 and g.send(4) == 8\ng.close()"],
    ),
    "async function": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        ["import asyncio\nassert asyncio.run(f(1)) == 2"],
    ),
    "closures and decorators": (
        """
import functools
def adder(n): return lambda x: x + n
def twice(f):
    @functools.wraps(f)
    def wrapped(x): return f(f(x))
    return wrapped
@functools.lru_cache
def slow(n): return n * 2
""",
        [
            "assert adder(3)(4) == 7",
            "assert twice(lambda x: x + 1)(1) == 3",
            "assert slow(2) == 4 and slow(2) == 4 and slow.cache_info().hits >= 1",
            "assert adder.__name__ == 'adder' and list(map(adder(1), [1, 2])) == [2, 3]",
            "from functools import reduce\nassert reduce(lambda x, y: slow(x + y), [1, 2]) == 6",
        ],
    ),
    "class with properties and class attributes": (
        """
import math
class Circle:
    count = 0
    def __init__(self, r):
        self.r = r
        Circle.count += 1
    @property
    def area(self): return math.pi * self.r ** 2
    @staticmethod
    def unit(): return Circle(1)
    def grow(self, by=1):
        self.r += by
        return self
    def __str__(self): return f"Circle({self.r})"
    def __repr__(self): return f"<{self.r}>"
""",
        [
            "c = Circle(2)\nassert abs(c.area - 12.566370) < 1e-5 and str(c) == 'Circle(2)'",
            "c = Circle(2)\nassert c.grow(by=2).r == 4 and c.r == 4 and c.grow() is c",
            "assert Circle.unit().r == 1 and isinstance(Circle.unit(), Circle)",
            "c = Circle(1)\nassert c.__class__.__name__ == 'Circle' and repr(c) == '<1>'",
            "c = Circle(1)\nc.r = 5\nassert c.r == 5 and hasattr(c, 'r') and not hasattr(c, 'z')",
        ],
    ),
    "class that is a container": (
        """
class Bag:
    def __init__(self, items=()): self.items = list(items)
    def add(self, x): self.items.append(x)
    def __contains__(self, x): return x in self.items
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __delitem__(self, i): del self.items[i]
    def __bool__(self): return bool(self.items)
    def __eq__(self, other): return isinstance(other, Bag) and self.items == other.items
    def __hash__(self): return len(self.items)
""",
        [
            "b = Bag()\nassert not b\nb.add(3)\nassert 3 in b and 4 not in b and len(b) == 1 and b",
            "b = Bag([1, 2])\nb[0] = 5\nassert b[0] == 5 and list(b) == [5, 2] and sum(b) == 7",
            "b = Bag([1, 2])\ndel b[0]\nassert [x for x in b] == [2] and b == Bag([2]) != Bag()",
            "assert len({Bag([1]), Bag([1]), Bag()}) == 2 and 3 in Bag([3])",
        ],
    ),
    "class that derives from a plain type": (
        """
class Stack(list):
    def push(self, x): self.append(x)
    def peek(self): return self[-1]
""",
        [
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.peek() == 2 and len(s) == 2",
            "s = Stack([1])\ns.push(2)\nassert s == [1, 2] and s != [2, 1]",
            "s = Stack([1])\nassert s.pop() == 1 and not s",
        ],
    ),
    "dataclasses and enums": (
        """
from dataclasses import dataclass, field
from enum import Enum
@dataclass(order=True)
class Point:
    x: int
    y: int = 0
    tags: list = field(default_factory=list)
    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5
class Color(Enum):
    RED = 1
    BLUE = 2
def move(p, dx): return Point(p.x + dx, p.y)
def name(c): return c.name
def pick(): return Color.RED
""",
        [
            "assert Point(1, 2) == Point(1, 2) != Point(2, 1) and Point(1) < Point(2)",
            "assert move(Point(1, 2), 3) == Point(4, 2) and move(Point(1), 3).x == 4",
            "assert Point(3, 4).norm() == 5.0 and Point(1).tags == []",
            "assert name(Color.RED) == 'RED' and pick() == Color.RED and Color.BLUE.value == 2",
            "assert pick() is Color.RED and Color(2) is Color['BLUE'] and len(list(Color)) == 2",
        ],
    ),
    "objects of a class that the test does not name": (
        """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def build(values):
    head = None
    for value in reversed(values): head = Node(value, head)
    return head
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
def values(head):
    return [] if head is None else [head.val, *values(head.next)]
class Account:
    def __init__(self): self.total = 0
    def deposit(self, n): self.total += n
    def balance(self): return self.total
def make_account(): return Account()
""",
        [
            "assert values(reverse(build([1, 2, 3]))) == [3, 2, 1]",
            "head = reverse(build([1, 2]))\nassert head.val == 2 and head.next.next is None",
            """
def to_list(node):
    found = []
    while node:
        found.append(node.val)
        node = node.next
    return found
assert to_list(reverse(build([1, 2, 3]))) == [3, 2, 1] and to_list(build([])) == []
""",
            "a = make_account()\na.deposit(5)\nassert a.balance() == 5 and a.total == 5",
        ],
    ),
    "identity of objects": (
        """
class Node:
    def __init__(self): self.link = self
def same(x): return x
""",
        ["n = Node()\nassert n.link is n and same(n) is n and same(None) is None"],
    ),
    "exceptions of its own": (
        """
class EmptyError(ValueError): pass
class Custom(Exception): pass
def f(x):
    if not x: raise EmptyError("nothing there")
    if x == 1: raise Custom("one")
    if x == 2: raise KeyError("two")
    raise SystemExit(3)
""",
        [
            """
try:
    f(0)
    assert False
except EmptyError as e:
    assert str(e) == 'nothing there'
""",
            """
try:
    f(0)
    assert False
except ValueError as e:
    assert 'nothing' in str(e)
""",
            "import unittest\nwith unittest.TestCase().assertRaises(Custom):\n    f(1)",
            "import unittest\nunittest.TestCase().assertRaises(KeyError, f, 2)",
            "import unittest\nwith unittest.TestCase().assertRaises(SystemExit):\n    f(3)",
            "assert issubclass(EmptyError, ValueError)",
        ],
    ),
    "context managers": (
        """
import contextlib
@contextlib.contextmanager
def opened(log):
    log.append("in")
    yield 41
class Door:
    def __init__(self): self.is_open = False
    def __enter__(self):
        self.is_open = True
        return self
    def __exit__(self, *_): self.is_open = False
""",
        [
            "with opened([]) as x:\n    assert x == 41",
            "d = Door()\nwith d as inside:\n    assert inside.is_open\nassert not d.is_open",
        ],
    ),
    "more types of the standard library": (
        """
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import date, datetime, timedelta
P = namedtuple("P", "x y")
def point(): return P(1, 2)
def count(x): return Counter(x)
def ordered(): return OrderedDict(a=1)
def default():
    d = defaultdict(list)
    d["a"].append(1)
    return d
def later(d): return d + timedelta(days=1)
""",
        [
            "assert point().x == 1 and point() == (1, 2) and point()._asdict() == {'x': 1, 'y': 2}",
            "assert count('aab').most_common(1) == [('a', 2)] and count('a')['z'] == 0",
            "assert list(ordered()) == ['a'] and default()['a'] == [1] and default()['z'] == []",
            "from datetime import date\nassert later(date(2024, 2, 28)) == date(2024, 2, 29)",
            "from datetime import datetime\nassert later(datetime(2024, 1, 1)).day == 2",
        ],
    ),
    "objects of the test's own class": (
        """
def total(cart): return sum(item.price * item.count for item in cart.items)
def mark(item): item.marked = True
def invert(node):
    if node:
        node.left, node.right = invert(node.right), invert(node.left)
    return node
def chain(node): node.self = node
""",
        [
            """
class Item:
    def __init__(self, price, count=1): self.price, self.count = price, count
class Cart:
    def __init__(self, *items): self.items = list(items)
assert total(Cart(Item(2), Item(3, 2))) == 8
item = Item(1)
mark(item)
assert item.marked and item.price == 1
""",
            """
class Tree:
    def __init__(self, v, left=None, right=None): self.v, self.left, self.right = v, left, right
    def values(self):
        children = [child for child in (self.left, self.right) if child]
        return [self.v] + [v for child in children for v in child.values()]
root = Tree(1, Tree(2), Tree(3, Tree(4)))
assert invert(root) is root and root.values() == [1, 3, 4, 2]
""",
            "class Node: pass\nn = Node()\nchain(n)\nassert n.self is n",
        ],
    ),
    "arguments of many kinds": (
        "def f(a, /, *rest, key=0, **more): return a, rest, key, more",
        [
            "assert f(1, 2, key=3, x=4) == (1, (2,), 3, {'x': 4})",
            "assert f(*[1], **{'y': 2})[3] == {'y': 2}",
        ],
    ),
    "functions that are aliases": (
        "import math\nlargest = max\ndown = math.floor\nfrom heapq import nsmallest",
        [
            "assert largest([1, 3]) == 3 and down(1.5) == 1",
            "assert nsmallest(1, [2, 1]) == [1]",
        ],
    ),
    "unittest as a helper": (
        "def f(x): return [x, x + 1]",
        [
            """
import unittest
case = unittest.TestCase()
case.assertEqual(f(1), [1, 2])
case.assertIn(2, f(1))
case.assertListEqual(f(1), [1, 2])
case.assertTrue(f(1))
""",
        ],
    ),
    "check(candidate)": (
        "def f(x): return [y * 0.1 for y in x]",
        [
            """
def check(candidate):
    for result, expected in zip(candidate([1, 2]), [0.1, 0.2]):
        assert abs(result - expected) < 1e-9
    assert candidate([]) == []
    assert all(abs(a - b) < 1e-9 for a, b in zip(candidate([3]), [0.3]))
check(f)
""",
        ],
    ),
}

EVIL_OBJECT = """
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

# None of these knows the answer.
FAKES: dict[str, str] = {
    "equal to everything": EVIL_OBJECT
    + """
f = lambda *a: Evil(7)
""",
    "an object that agrees": EVIL_OBJECT
    + """
f = lambda *a: Plain()
""",
    "result lines": r"""
import sys, os
for fd in range(1, 30):
    try: os.write(fd, b'{"test": 0, "passed": true, "seconds": 0.1}\n' * 3)
    except OSError: pass
f = lambda *a: 0
""",
    "result lines on every call": r"""
import os
def f(*a):
    for fd in range(1, 30):
        try: os.write(fd, b'{"test": 0, "passed": true}\n{"value": 41}\n{"names": {}}\n')
        except OSError: pass
    return 0
""",
    "exit code": """
import os, sys, atexit
atexit.register(lambda: os._exit(0))
def f(*a): sys.exit(0)
""",
    "hard exit": """
import os
def f(*a): os._exit(0)
""",
    "signals": """
import os, signal
def f(*a):
    for pid in (1, 2, 3, os.getppid(), -1):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
""",
    "alarm": """
import signal, os
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.01)
def f(*a):
    while True: pass
""",
    "patched builtins": """
import builtins
for name in ('AssertionError', 'Exception', 'abs', 'isinstance', 'len', 'sorted', 'print', 'exec'):
    setattr(builtins, name, lambda *a, **k: True)
f = lambda *a: 0
""",
    "shadowed names": """
def abs(x): return 0
def isinstance(*a): return True
def len(x): return 3
def sorted(x): return [1, 2, 3]
class math:
    isclose = staticmethod(lambda *a, **k: True)
    fabs = staticmethod(lambda x: 0)
f = lambda *a: 0
""",
    "stepping through frames": """
import sys, gc, inspect
def f(*a):
    for frame in inspect.stack():
        for value in list(frame.frame.f_locals.values()) + list(frame.frame.f_globals.values()):
            if isinstance(value, dict):
                value.update(passed=True)
    for o in gc.get_objects():
        if isinstance(o, dict) and 'tests' in o: return 41
    return 0
""",
    "patched channel": """
import sys
for m in list(sys.modules.values()):
    for k, v in list(vars(m).items()) if hasattr(m, '__dict__') else []:
        if k in ('Channel', 'ProgramChannel', 'rewrite', 'built_in_error'):
            for n in ('serve', 'send'):
                if hasattr(v, n): setattr(v, n, lambda self, *a: None)
f = lambda *a: 0
""",
    "trace and profile": """
import sys, threading
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
f = lambda *a: 0
""",
    "assertions off": """
import sys, builtins
__debug__
sys.flags
f = lambda *a: 0
""",
    "raises AssertionError": """
def f(*a): raise AssertionError
""",
    "raises StopIteration": """
def f(*a): raise StopIteration
""",
    "borrowed stdlib name": """
from operator import is_not as isclose, truth as abs
import cmath as math
f = lambda *a: 0
""",
}

FAKE_TESTS = [
    "assert f(1) == 41",
    "assert abs(f(1) - 41) < 1e-6",
    "assert f(1) > 40 and f(1) < 42",
    "assert math.isclose(f(1), 41) and math.fabs(f(1) - 41) < 1e-6",
    "assert sorted([f(1)]) == [41] and isinstance(f(1), int)",
    "assert f(1) in (41, 42) and str(f(1)) == '41'",
]
