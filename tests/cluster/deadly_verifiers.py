"""Verifiers that kill or stop their actor; tests name them as deadly_verifiers.py:function."""

import os
import signal
import time
from pathlib import Path


def by_command(response, problem):
    """Kills or stops the actor if the response is "kill" or "stop".

    With a file name after the command, only once: the file then exists.
    """
    command, _, mark = response.partition(" ")
    if command in ("kill", "stop") and not (mark and Path(mark).exists()):
        if mark:
            Path(mark).touch()
        os.kill(os.getppid(), signal.SIGKILL if command == "kill" else signal.SIGSTOP)
        time.sleep(60)
    return float(len(response))


def describe_process(response, problem):
    """Returns this process, its actor, and whether it runs in the folder `ground_truth`."""
    return {
        "score": 1.0,
        "pid": os.getpid(),
        "actor": os.getppid(),
        "in_folder": str(Path.cwd()) == problem.ground_truth,
    }
