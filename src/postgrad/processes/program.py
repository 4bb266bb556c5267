"""What the program of a child process does first. Imports no torch."""

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from postgrad.processes.channel import Channel

# A terminal or a scheduler sends these to all processes of a run. The parent handles them: it
# finishes its step first, and needs its children for that.
PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_child(main: Callable[[Channel], None]) -> None:
    """Run `main` with the channel to the parent. The arguments are those of child.start_process.

    An empty message tells the parent that this process has started.
    """
    channel_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(channel_fd, False)
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    for number in PARENT_SIGNALS:
        # A handler and not SIG_IGN, which programs started from here would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = Channel(socket.socket(fileno=channel_fd))
    with contextlib.suppress(ConnectionError):  # the parent was killed
        channel.send(b"")
        main(channel)


def _exit_with_parent(parent_pid: int) -> None:
    """Kill this process and all it started once the parent is gone, even if a call is running."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def limit_memory(extra_bytes: int | None) -> None:
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
