"""What runs in the pool's child process: read chunks of work, judge, answer. Imports no torch and nothing heavy of ours.

Messages are JSON lines over one socket. In: {"problems": [...], "items": [[id, path, problem index, response, seconds], ...]}.
Out: ["ready"], then for each item ["start", id] and ["done", id, value, parts] or ["failed", id, kind, reason]; ["bye"] before a
wanted exit. An item's clock runs from its "start", so loading its verifier does not count.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.verifier import load, one_line, run_verifier

GRACE_S = 2.0  # the parent kills at the time limit; the kernel's alarm does so this much later, should the parent be gone


def main() -> None:
    channel_fd, parent, timeout_s, memory_bytes = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    os.set_inheritable(channel_fd, False)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # the parent's to handle, where all processes of a run get it; it kills us when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=channel_fd)

    def send(*message: Any) -> None:
        channel.sendall(encode(message))

    known: set[str] = set()
    num_judged = 0
    send("ready")
    for line in channel.makefile("rb"):
        chunk = json.loads(line)
        problems = [problem_from(data) for data in chunk["problems"]]
        for item, path, index, response, seconds in chunk["items"]:
            try:
                function = load(path)
                if path not in known:  # what its imports took does not count
                    known.add(path)
                    _limit_memory(memory_bytes)
                send("start", item)
                # The alarm's default action ends the process, whatever Python is busy with.
                signal.setitimer(signal.ITIMER_REAL, max(timeout_s, seconds) + GRACE_S)
                outcome = run_verifier(function, response, problems[index])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except MemoryError:
                _limit_memory(None)
                # Others may have left the memory full: only the first response of a process is to blame, a later one starts afresh.
                if num_judged == 0:
                    send(
                        "failed",
                        item,
                        "crash",
                        f"the verifier needed more than {memory_bytes >> 20} MiB of memory",
                    )
                send("bye")
                os._exit(0)
            except ConfigError as error:
                outcome = Failure("error", one_line(error))
            num_judged += 1
            if isinstance(outcome, Score):
                send("done", item, outcome.value, outcome.parts)
            else:
                send("failed", item, outcome.kind, outcome.reason[:1000])


def encode(message: Any) -> bytes:
    """One line of JSON. What JSON does not know (arrays and scalars of NumPy in `extra`) becomes lists, numbers or text."""
    plain = json.dumps(
        message,
        skipkeys=True,
        default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value),
    )
    return plain.encode() + b"\n"


def problem_from(data: dict[str, Any]) -> Problem:
    """The problem that was sent as `vars(problem)`; JSON has made its tuples lists."""
    messages, demonstrations = tuple(data["messages"]), tuple(data["demonstrations"])
    return Problem(
        data["uid"],
        messages,
        data["ground_truth"],
        data["data_source"],
        demonstrations,
        data["extra"],
    )


def _exit_with(parent: int) -> None:
    """End this process and all it started once its parent is gone, also while a verifier is busy."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _limit_memory(beyond: int | None) -> None:
    """Let the address space grow by so many bytes from here on (None: without limit)."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
    except OSError:  # no /proc on macOS, where the limit is not enforced either
        return
    soft = resource.RLIM_INFINITY if beyond is None else pages * resource.getpagesize() + beyond
    resource.setrlimit(
        resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the parent was killed: nobody is left to tell
        main()
