"""Both runners in one sandbox, for a server that runs one program per request (Sandbox Fusion).

This process runs the tests, and a child process runs the program. Standard input is JSON with the
limits (`settings`), the `program` and the tests (`suite`). The results are printed, each with a
random key that the child does not get. The child's standard streams are /dev/null, and no test
reaches it. Between the two there is nothing but the separation of two processes of one user: on
such a server, its own isolation counts.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from . import test_runner

FOLDER = str(Path(__file__).parent.parent)
CHILD_CODE = (
    f"import sys; sys.path.insert(0, {FOLDER!r}); from inside import program_runner; "
    "sys.path.pop(0); program_runner.main()"
)
STACK_BYTES = 16 << 20  # Fusion's limit is all of the memory, and then no thread can start
PR_SET_DUMPABLE = 4


def main() -> None:
    message = json.load(sys.stdin)
    forbid_inspection()
    results_fd = os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_fd, 1)  # what a test prints must not get among the results
    limit_stack()
    test_socket, program_socket = socket.socketpair()
    source = temporary_file(message["program"].encode("utf-8", "surrogatepass"))
    suite = temporary_file(json.dumps(message["suite"]).encode())
    ready, child_ready = os.pipe()
    child_fds = {
        "program": source.fileno(),
        "ready": child_ready,
        "peer": program_socket.fileno(),
    }
    settings = dict(message["settings"])
    key = settings.pop("key")
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", CHILD_CODE, json.dumps(settings | child_fds)],
        pass_fds=list(child_fds.values()),
        stdin=null_fd,
        stdout=null_fd,
        stderr=null_fd,
    )

    def kill_child(*_: Any) -> None:  # at the alarm of the test runner
        child.kill()
        child.wait()
        os._exit(1)

    signal.signal(signal.SIGALRM, kill_child)
    program_socket.close()
    os.close(child_ready)
    if os.read(ready, 1) != b"r":
        sys.exit("the program's interpreter did not start")
    own_fds = {"tests": suite.fileno(), "control": results_fd, "peer": test_socket.fileno()}
    sys.argv[1:] = [json.dumps(settings | own_fds | {"key": key})]
    try:
        test_runner.main()
    finally:
        child.kill()
        child.wait()


def forbid_inspection() -> None:
    """Keep other processes of this user from reading this process's memory and files (not root)."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it; bwrap isolates too
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_stack() -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)
    limit = STACK_BYTES
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_STACK, (limit, hard_limit))


def temporary_file(content: bytes) -> IO[bytes]:
    """Return an unnamed file with this content, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this process)
    file.write(content)
    file.seek(0)
    return file
