"""The main program of a pool's child process: reads chunks of work, runs verifiers, replies.

Messages are JSON; see processes/supervisor.py.

- In: {"problems": [...], "items": [[id, path, arguments, problem index, response,
  time limit in s], ...]}.
- Out: per item ["start", id], then ["done", id, "score", value, parts] or
  ["done", id, kind of failure, reason]. ["pause", id, module] when a verifier imports a package
  while it scores, and "start" again when the import has ended. ["bye"] before the process exits on
  purpose.

The clock of an item starts with its last "start", so imports do not count.
Imports no torch.
"""

import builtins
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Score, problem_from
from postgrad.processes.channel import Channel, to_json
from postgrad.processes.program import limit_memory, run_child
from postgrad.verifiers.loading import load_verifier
from postgrad.verifiers.port import one_line, run_verifier

# The parent kills at the time limit. If it is gone, the kernel's alarm does, this much later.
GRACE_S = 2.0


def main(channel: Channel) -> None:
    timeout_s, memory_bytes = float(sys.argv[3]), int(sys.argv[4])

    def send(*message: Any) -> None:
        channel.send(to_json(message))

    loaded_paths: set[str] = set()
    num_scored = 0
    imports = _Imports(send, memory_bytes)
    while (message := channel.receive()) is not None:
        chunk = json.loads(message)
        problems = [problem_from(fields) for fields in chunk["problems"]]
        for item, path, arguments, problem_index, response, time_limit_s in chunk["items"]:
            try:
                verifier = partial(load_verifier(path), **arguments)
                if path not in loaded_paths:  # memory taken by imports does not count
                    loaded_paths.add(path)
                    limit_memory(memory_bytes)
                with imports.watched(item, max(timeout_s, time_limit_s) + GRACE_S):
                    outcome = run_verifier(verifier, response, problems[problem_index])
            except MemoryError:
                limit_memory(None)
                # Earlier items may have filled the memory. So an item fails only if it is the first
                # of its process; a later one is run again in a fresh process.
                if num_scored == 0:
                    reason = f"the verifier needed more than {memory_bytes >> 20} MiB of memory"
                    send("done", item, "crash", reason)
                send("bye")
                os._exit(0)
            except ConfigError as error:
                outcome = Failure("error", one_line(error))
            num_scored += 1
            if isinstance(outcome, Score):
                send("done", item, "score", outcome.value, outcome.parts)
            else:
                send("done", item, outcome.kind, outcome.reason[:1000])


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
        self.send("pause", self.item, name)
        limit_memory(None)
        builtins.__import__ = self.import_module  # what the package imports needs no message
        try:
            return self.import_module(name, globals, locals, fromlist, level)
        finally:
            builtins.__import__ = self._import
            limit_memory(self.memory_bytes)
            self._start_clock()


if __name__ == "__main__":
    run_child(main)
