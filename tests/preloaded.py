"""Python programs that start in a fraction of a second: forked from a process with torch.

Importing torch and transformers takes about seven seconds of CPU time per process. One server per
test process imports them and forks for each program. The program is `__main__` of its process,
with its own arguments, environment, folder and standard streams. At its end it joins its threads
and calls the functions of atexit; only the removal of every object is left out.

Tests of how a command starts, or of what it imports, use subprocess.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from postgrad.processes import child, program

COMMAND = "import sys; from postgrad.cli.main import main; sys.exit(main())"
CHILD = (
    "import os, sys; from postgrad.cluster.child_main import main, run_child; "
    "sys.argv[2] = str(os.getppid()); run_child(main)"
)
LIBRARIES = (
    "torch",
    "pandas",  # pyarrow imports it when it is installed
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
# Programs in Triton's interpreter change constants of these before they import them.
MODULES = (
    "postgrad.training.driver",
    "postgrad.evaluation.run",
    "postgrad.cluster.host",
    "postgrad.cli.train",
)
FIRST_FREE = 100  # descriptors below this are those of the program
SERVERS: dict[str, socket.socket] = {}
START_PROCESS = child.start_process


class Process:
    """A forked process with the part of subprocess.Popen that tests use.

    `streams` are the descriptors of its stdin, stdout and stderr, `pass_fds` others that keep
    their numbers. `own_group` gives it a process group of its own. `interpret` runs Triton's
    kernels in its interpreter.
    """

    stdin = stdout = stderr = None  # no pipes, unless `streams` has some

    def __init__(
        self,
        program: str,
        *arguments: object,
        streams: tuple[int, int, int] = (0, 1, 2),
        pass_fds: tuple[int, ...] = (),
        env: dict[str, str] | None = None,
        cwd: Path | str | None = None,
        own_group: bool = False,
        interpret: bool = False,
    ) -> None:
        self.returncode: int | None = None
        request = {
            "program": program,
            "arguments": [str(argument) for argument in arguments],
            "numbers": pass_fds,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "own_group": own_group,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        self.status, status = os.pipe()
        try:
            descriptors = [status, *streams, *pass_fds]
            socket.send_fds(_server(interpret), [json.dumps(request).encode()], descriptors)
        finally:
            os.close(status)
        self.pid = self._read()

    def _read(self) -> int:
        data = os.read(self.status, 4)
        if len(data) < 4:
            raise RuntimeError("the server of tests/preloaded.py died")
        return struct.unpack("i", data)[0]

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self.status], [], [], timeout)[0]:
            self.returncode = self._read()
            os.close(self.status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    program: str, *arguments: object, timeout: float = 600, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs a program as `python -c` does, and returns what it printed."""
    with (
        open(os.devnull) as nothing,  # noqa: PTH123
        open(os.memfd_create("out"), "w+") as out,  # noqa: PTH123
        open(os.memfd_create("err"), "w+") as err,  # noqa: PTH123
    ):
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        process = Process(program, *arguments, streams=streams, **options)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read(), err.read())


def launch_kernel(command: list[str], env: dict[str, str], cwd: str, **options: Any) -> Process:
    """Replaces launch_kernel of jupyter_client: starts the kernel of a notebook."""
    program = "from ipykernel import kernelapp; kernelapp.launch_new_instance()"
    arguments = command[command.index("-f") :]
    return Process(program, *arguments, env=env, cwd=cwd, own_group=True)


def start_process(
    module: str, arguments: Sequence[object], child_end: socket.socket, env: Mapping[str, str]
) -> Any:
    """Replaces processes.child.start_process: a child with torch starts without the imports."""
    if module != "postgrad.cluster.child_main":
        return START_PROCESS(module, arguments, child_end, env)
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, program.PARENT_SIGNALS)
    try:
        with open(os.devnull) as nothing:  # noqa: PTH123
            return Process(
                CHILD,
                child_end.fileno(),
                os.getpid(),
                *arguments,
                streams=(nothing.fileno(), 2, 2),
                pass_fds=(child_end.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
                own_group=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


# ---- the server


def _server(interpret: bool) -> socket.socket:
    """Returns the connection to a server, which ends with this process."""
    key = "1" if interpret else "0"
    if key not in SERVERS:
        SERVERS[key], other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__)), str(other.fileno())]
        environment = {**os.environ, "TRITON_INTERPRET": key}
        subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
        other.close()
    return SERVERS[key]


def serve(connection: socket.socket) -> None:
    """Forks for each request. Returns when the test process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not data:
            return
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_and_report(json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Runs the program in a child of this process, which reports its number and its exit code."""
    status, *others = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _exit_after(lambda: _run(request, others))
    for descriptor in others:
        os.close(descriptor)
    if request["own_group"]:
        os.setpgid(pid, pid)  # before anybody knows the process
    os.write(status, struct.pack("i", pid))
    _, code = os.waitpid(pid, 0)
    os.write(status, struct.pack("i", os.waitstatus_to_exitcode(code)))
    os._exit(0)


def _exit_after(work: Callable[[], None]) -> NoReturn:
    """Ends this process after the work as Python does, without removing every object.

    Those of the server are many, and shared with it until they are touched.
    """
    code: Any = 0
    try:
        work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the reader may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    moved = []
    for descriptor in descriptors:
        moved.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_FREE))
        os.close(descriptor)
    for descriptor, number in zip(moved, [0, 1, 2, *request["numbers"]], strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["arguments"]]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path = ["", *folders, *(folder for folder in sys.path[1:] if folder not in folders)]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(request["program"], "<string>", "exec"), vars(main))


def _quicken_interpreter() -> None:
    """Makes Triton's interpreter about twice as fast; what it computes is the same.

    It patches its language before each call of a device function, and not just once per kernel. It
    makes a table of types for each tensor. It compares each sum of integers with that in 64 bits,
    though the tensors of tests are far too small for an overflow.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch = interpreter._patch_lang
    patched: set[int] = set()

    find_numpy_type = interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def numpy_type_of(type_: Any) -> Any:
        name = str(type_.scalar)
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(type_.scalar)
        return numpy_types[name]

    def patch_for_kernel(function: Any) -> Any:
        patched.clear()
        return patch(function)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(self.fn)
        return self.rewrite()(*arguments, **options)

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_type_of
    interpreter._patch_lang = patch_for_kernel
    interpreter.InterpretedFunction.__call__ = call


if __name__ == "__main__":
    import importlib

    interpret = os.environ["TRITON_INTERPRET"] == "1"
    for module in LIBRARIES if interpret else (*LIBRARIES, *MODULES):
        # The environment of make test-vllm does not have all libraries of the other one.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if interpret:
        _quicken_interpreter()
    gc.freeze()  # a collection in a forked process leaves the shared memory alone
    serve(socket.socket(fileno=int(sys.argv[1])))
