"""Programs for the sandbox: right ones with tests they pass, and wrong ones that try to pass all the same."""

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
def f(): return (1, 2.5, None, True, 'é', b'x', {3: frozenset([4])}, 1j, range(3), 10 ** 30)
""",
        [
            "assert f() == (1, 2.5, None, True, 'é', b'x', {3: frozenset([4])}, 1j, range(3), 10 ** 30)",
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
import re, json, itertools, functools, heapq, bisect, random, string, datetime, typing, dataclasses, asyncio
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
for name in ("__eq__", "__lt__", "__gt__", "__sub__", "__abs__", "__float__", "__contains__", "__instancecheck__"):
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
        try: os.write(fd, b'{"test": 0, "passed": true, "seconds": 0.1}\n{"value": 41}\n{"names": {}}\n')
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
for name in ('AssertionError', 'Exception', 'abs', 'isinstance', 'len', 'sorted', 'print', 'compile', 'exec'):
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
    "patched wire": """
import sys
for m in list(sys.modules.values()):
    for k, v in list(vars(m).items()) if hasattr(m, '__dict__') else []:
        if k in ('Wire', 'ProgramWire', 'rewrite', 'error_named'):
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
