"""The main program of a pool's child process: reads chunks of work, runs verifiers, replies.

Messages are JSON lines over one socket.

- In: {"problems": [...], "items": [[id, path, problem index, response, time limit in s], ...]}.
- Out: ["ready"] once. Per item ["start", id], then ["done", id, value, parts] or
  ["failed", id, kind, reason]. ["importing", id, module] when a verifier imports a package while
  it scores, and "start" again when the import has ended. ["bye"] before the process exits on
  purpose.

The clock of an item starts with its last "start", so imports do not count.
Imports no torch.
"""

import builtins
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.lookup import load_verifier
from postgrad.verifiers.port import one_line, run_verifier

# The parent kills at the time limit. If it is gone, the kernel's alarm does, this much later.
GRACE_S = 2.0


def main() -> None:
    channel_fd = int(sys.argv[1])
    parent_pid = int(sys.argv[2])
    timeout_s = float(sys.argv[3])
    memory_bytes = int(sys.argv[4])
    os.set_inheritable(channel_fd, False)
    threading.Thread(target=exit_with_parent, args=(parent_pid,), daemon=True).start()
    # A scheduler may send SIGTERM to all processes of a run. The parent handles it and kills us.
    signal.signal(signal.SIGTERM, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=channel_fd)

    def send(*message: Any) -> None:
        channel.sendall(encode(message))

    loaded_paths: set[str] = set()
    num_scored = 0
    imports = _Imports(send, memory_bytes)
    send("ready")
    for line in channel.makefile("rb"):
        chunk = json.loads(line)
        problems = [decode_problem(data) for data in chunk["problems"]]
        for item, path, problem_index, response, time_limit_s in chunk["items"]:
            try:
                verifier = load_verifier(path)
                if path not in loaded_paths:  # memory taken by imports does not count
                    loaded_paths.add(path)
                    _limit_memory(memory_bytes)
                with imports.watched(item, max(timeout_s, time_limit_s) + GRACE_S):
                    outcome = run_verifier(verifier, response, problems[problem_index])
            except MemoryError:
                _limit_memory(None)
                # Earlier items may have filled the memory. So an item fails only if it is the first
                # of its process; a later one is run again in a fresh process.
                if num_scored == 0:
                    reason = f"the verifier needed more than {memory_bytes >> 20} MiB of memory"
                    send("failed", item, "crash", reason)
                send("bye")
                os._exit(0)
            except ConfigError as error:
                outcome = Failure("error", one_line(error))
            num_scored += 1
            if isinstance(outcome, Score):
                send("done", item, outcome.value, outcome.parts)
            else:
                send("failed", item, outcome.kind, outcome.reason[:1000])


class _Imports:
    """Stops the clock and lifts the memory limit while a verifier imports a package.

    Functions often import heavy packages when they are first called.
    """

    def __init__(self, send: Callable[..., None], memory_bytes: int) -> None:
        self.send = send
        self.memory_bytes = memory_bytes
        self.import_module = builtins.__import__
        self.item: Any = None
        self.limit_s = 0.0

    @contextlib.contextmanager
    def watched(self, item: Any, limit_s: float) -> Iterator[None]:
        """Start the clock of an item; it stops while the block imports."""
        self.item = item
        self.limit_s = limit_s
        self._start_clock()
        builtins.__import__ = self._import
        try:
            yield
        finally:
            builtins.__import__ = self.import_module
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _start_clock(self) -> None:
        self.send("start", self.item)
        # SIGALRM's default action ends the process, also while C code runs.
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if name in sys.modules or level > 0 or not in_main_thread:
            return self.import_module(name, globals, locals, fromlist, level)
        signal.setitimer(signal.ITIMER_REAL, 0)  # the parent limits the time of imports
        self.send("importing", self.item, name)
        _limit_memory(None)
        builtins.__import__ = self.import_module  # what the package imports needs no message
        try:
            return self.import_module(name, globals, locals, fromlist, level)
        finally:
            builtins.__import__ = self._import
            _limit_memory(self.memory_bytes)
            self._start_clock()


def encode(message: Any) -> bytes:
    """Return the message as one line of JSON.

    Arrays and scalars of NumPy become lists and numbers; other values that JSON does not have
    become text.
    """
    return json.dumps(message, skipkeys=True, default=as_json_value).encode() + b"\n"


def as_json_value(value: Any) -> Any:
    """Return what stands for a value that JSON does not have: lists and numbers, or its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def decode_problem(data: dict[str, Any]) -> Problem:
    """Return the problem that was sent as sent_fields; JSON has made lists of its tuples."""
    return Problem(
        data["uid"],
        tuple(data["messages"]),
        data["ground_truth"],
        data["data_source"],
        tuple(data["demonstrations"]),
        data["extra"],
    )


def exit_with_parent(parent_pid: int) -> None:
    """Kill this process and all it started once the parent is gone, even if a verifier is busy."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _limit_memory(extra_bytes: int | None) -> None:
    """Let the address space grow by this many bytes from its present size; None: no limit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    try:
        num_pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
    except OSError:  # macOS has no /proc, and does not enforce the limit either
        return
    limit = resource.RLIM_INFINITY
    if extra_bytes is not None:
        limit = num_pages * resource.getpagesize() + extra_bytes
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the parent was killed
        main()
