"""Verifiers that end or stop the actor above them; tests name them as deadly_verifiers.py:function."""

import os
import signal
import time
from pathlib import Path


def by_command(response, problem):
    """What the response says; once, where it names a file that is then there."""
    word, _, mark = response.partition(" ")
    if word in ("kill", "stop") and not (mark and Path(mark).exists()):
        if mark:
            Path(mark).touch()
        os.kill(os.getppid(), signal.SIGKILL if word == "kill" else signal.SIGSTOP)
        time.sleep(60)
    return float(len(response))


def below(response, problem):
    """Who judges: its own process, the actor above, and the folder they stand in."""
    return {
        "score": 1.0,
        "pid": os.getpid(),
        "actor": os.getppid(),
        "here": str(Path.cwd()) == problem.ground_truth,
    }
