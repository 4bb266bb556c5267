"""bubblewrap's side of the sandbox: the walls around one interpreter, what of this system stands within them, and its start."""

import contextlib
import json
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from postgrad.sandbox.outcome import Limits, SandboxError
from postgrad.sandbox.seccomp import seccomp_filter

INSIDE = Path(__file__).parent / "inside"
START_LIMIT_S = (
    30.0  # for an interpreter to start inside; the program's own clock starts after that
)
INSTALL = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap) and allow user namespaces, or run as root"


@dataclass(frozen=True)
class Level:
    """How the walls are built here: the version of bubblewrap, whether by root with users of their own, and the call filter."""

    version: str
    own_user: bool
    filtered: bool

    def __str__(self) -> str:
        user = "a user id of its own" if self.own_user else "a user namespace"
        calls = (
            "system calls filtered"
            if self.filtered
            else "system calls not filtered (unknown processor)"
        )
        return f"{self.version}: {user}, no network, empty environment, read-only system, limits on all resources, {calls}"


class SandboxProcess:
    """One interpreter under bubblewrap, with the files and sockets that were given to it."""

    def __init__(
        self,
        level: Level,
        limits: Limits,
        module: str,
        settings: dict[str, Any],
        fds: Sequence[int],
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        output: int = subprocess.DEVNULL,
    ) -> None:
        uid = random.SystemRandom().randrange(1_900_000_000, 2_000_000_000) if level.own_user else 0
        code = f"import sys; sys.path.insert(0, '/'); from inside import {module}; sys.path.pop(0); {module}.main()"
        words = [*walls(level, limits), _python(), "-I", "-S", "-B", "-c", code]
        words.append(json.dumps(limits.settings(uid, settings.pop("num_tests", 1)) | settings))
        filters = seccomp_filter() if level.filtered else None
        with filled(filters or b"") as file:
            if filters:
                words[1:1] = ["--seccomp", str(file.fileno())]
            pass_fds = [*fds, file.fileno()]
            self.process = subprocess.Popen(
                words, env={}, cwd="/", pass_fds=pass_fds, stdin=stdin, stdout=output, stderr=output
            )

    def __enter__(self) -> "SandboxProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # bubblewrap takes along everything inside
        self.process.wait()


@contextlib.contextmanager
def filled(content: bytes) -> Iterator[IO[bytes]]:
    """A file without a name that holds these bytes, open for reading only."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as readable:  # noqa: PTH123
            yield readable


def _python() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


@cache
def bubblewrap() -> str:
    found = shutil.which("bwrap")
    if not found:
        raise SandboxError(f"bubblewrap (bwrap) is not installed: {INSTALL}")
    return found


def walls(level: Level, limits: Limits) -> list[str]:
    """bubblewrap's arguments: all namespaces new, nothing of this system but the interpreter and its libraries."""
    words = [
        bubblewrap(),
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if level.own_user:  # root builds the walls and inside/confine.py gives root up for a user id that nobody else has
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += [
            "--unshare-user",
            "--disable-userns",
            "--uid",
            "65534",
            "--gid",
            "65534",
            "--cap-drop",
            "ALL",
        ]
    words += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for name, value in (
        ("PATH", "/nowhere"),
        ("HOME", "/tmp"),
        ("LANG", "C.UTF-8"),
        ("PYTHONHASHSEED", "0"),
    ):
        words += ["--setenv", name, value]
    system = _system()
    for parent in dict.fromkeys(parent for path in system for parent in reversed(path.parents)):
        words += [
            "--perms",
            "0755",
            "--dir",
            str(parent),
        ]  # made on the way it would be closed to others
    for path in system:
        words += (
            ["--symlink", str(path.readlink()), str(path)]
            if path.is_symlink()
            else ["--ro-bind", str(path), str(path)]
        )
    words += ["--perms", "0755", "--dir", "/dev"]
    for device in ("null", "zero", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    words += ["--ro-bind", str(INSIDE), "/inside"]
    words += [
        "--perms",
        "1777",
        "--size",
        str(limits.disk_mb << 20),
        "--tmpfs",
        "/tmp",
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
    ]
    return words


@cache
def _system() -> list[Path]:
    """The interpreter, its library and the shared libraries of the system, where they are here."""
    prefix = Path(sys.base_prefix)
    paths = [
        Path(name) for name in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
    ]
    paths += [prefix / "lib", prefix / "lib64", Path(_python())]
    found = [path for path in dict.fromkeys(paths) if path.exists()]
    return [
        path
        for path in found
        if not any(other in path.parents and not other.is_symlink() for other in found)
    ]


def started(process: subprocess.Popen[bytes], ready: int) -> None:
    """Wait until the interpreter inside says that it is ready.

    Raises:
        SandboxError: it did not.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(ready, selectors.EVENT_READ)
        if selector.select(START_LIMIT_S) and os.read(ready, 1) == b"r":
            return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    said = (
        process.stderr.read(2000).decode(errors="replace")
        if process.stderr and process.poll() is not None
        else ""
    )
    last = said.strip().splitlines()[-1:] or [f"exit code {process.poll()}"]
    raise SandboxError(f"the sandbox does not start: {last[0]}"[:300])
