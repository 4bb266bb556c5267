"""User verifiers, good and bad, for the tests of the pool."""

import ctypes
import math
import os
import subprocess
import sys
import time
from pathlib import Path


def length(response, problem):
    return float(len(response))


def process(response, problem):
    """Return which process scores; it takes some time, so that all children get work."""
    time.sleep(0.01)
    return float(os.getpid())


def by_command(response, problem):
    """Do what the response says, so that good and bad responses can be in one chunk."""
    if response == "sleep":
        time.sleep(1000)
    if response == "exit":
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "memory":
        hoard = []
        while True:
            hoard.append(bytes(64 << 20))
    if response == "raise":
        raise ValueError("bad answer\nwith a second line")
    if response == "system exit":
        sys.exit(3)
    if response == "recursion":
        return by_command(response, problem)
    if response == "hold the lock":
        return len(str(10 ** (10**9)))
    if response == "close everything":
        os.closerange(3, 100)
        time.sleep(1000)
    if response == "print":
        print('["done", 0, 99.0, {}]', flush=True)
        os.write(1, b"noise\n" * 100)
    return 1.0


LEAK = []


def leaks(response, problem):
    LEAK.append(bytes(700 << 20))
    return 1.0


def returns(response, problem):
    return {
        "true": True,
        "int": 2,
        "float": 0.25,
        "dict": {"score": 0.5, "acc": True, "pred": "42"},
        "nan": math.nan,
        "infinite": math.inf,
        "nan part": {"score": 1.0, "acc": math.nan},
        "none": None,
        "text": "1.0",
        "no score": {"acc": 1.0},
        "list": [1.0],
    }[response]


def grandchild(response, problem):
    """Start a process, write its id to the file that the response names, and hang."""
    process = subprocess.Popen(["sleep", "1000"])
    Path(response).write_text(str(process.pid))
    time.sleep(1000)


def inspect_environment(response, problem):
    return {
        "score": 1.0,
        "torch": "torch" in sys.modules,
        "pid": os.getpid(),
        "messages": isinstance(problem.messages, tuple) and problem.messages[0]["content"] == "?",
        "demonstrations": problem.demonstrations == ("a", "b"),
        "extra": problem.extra == {"array": [1, 2], "number": 3.5},
    }


not_a_function = 3
