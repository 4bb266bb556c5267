"""bubblewrap's arguments, and the start of an interpreter under bubblewrap."""

import contextlib
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from postgrad.sandbox.cancellation import current
from postgrad.sandbox.outcome import Limits, SandboxError
from postgrad.sandbox.seccomp import seccomp_filter

INSIDE = Path(__file__).parent / "inside"
START_LIMIT_S = 30.0  # for the interpreter to start; the program's own time starts after that
INSTALL = (
    "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap) and allow user "
    "namespaces, or run as root"
)
UNUSED_UIDS = (1_900_000_000, 2_000_000_000)
NOBODY = "65534"
ENVIRONMENT = {
    "PATH": "/nowhere",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
DEVICES = ("null", "zero", "random", "urandom")


@dataclass(frozen=True)
class Level:
    """How programs are isolated on this machine.

    Attributes:
        version: of bubblewrap.
        own_user: every sandbox gets an unused user id (needs root); otherwise a user namespace.
        filtered: system calls are filtered.
    """

    version: str
    own_user: bool
    filtered: bool

    def __str__(self) -> str:
        user = "a user id of its own" if self.own_user else "a user namespace"
        calls = "filtered" if self.filtered else "not filtered (unknown processor)"
        return (
            f"{self.version}: {user}, no network, empty environment, read-only system, "
            f"limits on all resources, system calls {calls}"
        )


class SandboxProcess:
    """One interpreter under bubblewrap, as a context manager that kills it.

    Args:
        module: the module of inside/ whose main() runs.
        settings: for that module, beside the limits.
        fds: file descriptors that the process inherits.
        num_tests: how many tests share the processor time.
    """

    def __init__(
        self,
        level: Level,
        limits: Limits,
        module: str,
        settings: dict[str, Any],
        fds: Sequence[int],
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        output: int = subprocess.DEVNULL,
        num_tests: int = 1,
    ) -> None:
        uid = random.SystemRandom().randrange(*UNUSED_UIDS) if level.own_user else 0
        code = (
            f"import sys; sys.path.insert(0, '/'); from inside import {module}; "
            f"sys.path.pop(0); {module}.main()"
        )
        all_settings = json.dumps(limits.settings(uid, num_tests) | settings)
        command = [
            *bwrap_args(level, limits),
            *[_interpreter(), "-I", "-S", "-B", "-c", code, all_settings],
        ]
        call_filter = seccomp_filter() if level.filtered else None
        with readable_file(call_filter or b"") as file:
            if call_filter:
                command[1:1] = ["--seccomp", str(file.fileno())]
            self.process = subprocess.Popen(
                command,
                env={},
                cwd="/",
                pass_fds=[*fds, file.fileno()],
                stdin=stdin,
                stdout=output,
                stderr=output,
            )
        self._cancellation = current.get()
        if self._cancellation is not None:
            self._cancellation.add(self)

    def __enter__(self) -> "SandboxProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()
        if self._cancellation is not None:
            self._cancellation.remove(self)

    def kill(self) -> None:
        """Kill bubblewrap and its child, with which everything inside ends.

        The child outlives a bubblewrap that is killed while it sets up the sandbox. A process that
        is stopped has no further children.
        """
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGSTOP)
        pid = self.process.pid
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        self.process.kill()


@contextlib.contextmanager
def readable_file(content: bytes) -> Iterator[IO[bytes]]:
    """Yield an unnamed file with this content, open for reading only."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as readable:  # noqa: PTH123
            yield readable


def _interpreter() -> str:
    """Return the path of the interpreter itself, not of a virtual environment's link to it."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


@cache
def find_bubblewrap() -> str:
    """Return the path of bwrap. Raises SandboxError."""
    path = shutil.which("bwrap")
    if not path:
        raise SandboxError(f"bubblewrap (bwrap) is not installed: {INSTALL}")
    return path


def bwrap_args(level: Level, limits: Limits) -> list[str]:
    """Return bubblewrap's command line up to the command that it runs.

    All namespaces are new. Of this system the sandbox has the interpreter and its libraries only.
    """
    args = [
        find_bubblewrap(),
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        *_user_args(level),
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    args += ["--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        args += ["--setenv", name, value]
    args += _system_args()
    args += ["--perms", "0755", "--dir", "/dev"]
    for device in DEVICES:
        args += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    args += ["--ro-bind", str(INSIDE), "/inside"]
    args += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
    args += ["--remount-ro", "/"]
    args += ["--chdir", "/tmp"]
    return args


def _user_args(level: Level) -> list[str]:
    if level.own_user:  # root sets the sandbox up; inside/limits.py then changes to an unused user
        return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        *["--unshare-user", "--disable-userns"],
        *["--uid", NOBODY, "--gid", NOBODY],
        *["--cap-drop", "ALL"],
    ]


def _system_args() -> list[str]:
    """Return the arguments that mount the interpreter and its libraries, read-only."""
    paths = _system_paths()
    parents = [parent for path in paths for parent in reversed(path.parents)]
    args: list[str] = []
    for parent in dict.fromkeys(parents):
        # Folders that bubblewrap makes on its own are not readable for other users.
        args += ["--perms", "0755", "--dir", str(parent)]
    for path in paths:
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        else:
            args += ["--ro-bind", str(path), str(path)]
    return args


@cache
def _system_paths() -> list[Path]:
    """Return the existing paths of the interpreter, its library and the shared libraries."""
    prefix = Path(sys.base_prefix)
    candidates = [
        Path("/usr/lib"),
        Path("/usr/lib64"),
        Path("/lib"),
        Path("/lib64"),
        Path("/etc/ld.so.cache"),
        prefix / "lib",
        prefix / "lib64",
        Path(_interpreter()),
    ]
    paths = [path for path in dict.fromkeys(candidates) if path.exists()]
    folders = {path for path in paths if not path.is_symlink()}
    return [path for path in paths if folders.isdisjoint(path.parents)]


def wait_until_ready(process: subprocess.Popen[bytes], ready_fd: int) -> None:
    """Wait until the interpreter inside writes that it is ready.

    Raises:
        SandboxError: it does not start.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(ready_fd, selectors.EVENT_READ)
        if selector.select(START_LIMIT_S) and os.read(ready_fd, 1) == b"r":
            return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    exit_code = process.poll()
    errors = ""
    if process.stderr and exit_code is not None:
        errors = process.stderr.read(2000).decode(errors="replace")
    last_line = errors.strip().splitlines()[-1:] or [f"exit code {exit_code}"]
    raise SandboxError(f"the sandbox does not start: {last_line[0]}"[:300])
