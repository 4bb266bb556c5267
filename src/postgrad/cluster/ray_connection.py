"""Starts a Ray cluster on this machine, or joins one; with token authentication."""

import atexit
import importlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from postgrad.cluster.ports import START_S
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import NotInstalled, RunError, Unreachable, WrongValue, first_line
from postgrad.files import acquire_lock, is_locked

CONNECT_S = 5.0  # time limit to connect to the address of a cluster
TOKEN_PREFIX = "postgrad-ray-"  # of the folders with token files


@contextmanager
def connect(config: Config | EngineConfig) -> Iterator[Any]:
    """Yield the ray module, connected: to cluster.address, or to a new cluster on this machine.

    The block's end disconnects, and stops a cluster that was started here. If this process is
    connected already, that connection is used and kept.

    Raises: ConfigError if Ray is missing or the address cannot be joined; RunError if Ray does
        not start.
    """
    if config.cluster.address:
        # Seconds until Ray gives up; a running cluster answers at once.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        with keep_sigterm_handler():
            if config.cluster.address:
                join(ray, config.cluster.address)
            else:
                start_local(ray)
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Return the ray module, configured before its import: token on, quiet, no usage reports.

    Raises: ConfigError if Ray is not installed.
    """
    # Ray reads its settings at import. If it was imported before they were set, read them again.
    must_reread = "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    # Ray's future default; setting it avoids a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise NotInstalled(
            "cluster=ray needs one more package: pip install 'postgrad[cluster]'"
        ) from error
    if must_reread:
        ray._raylet.Config.initialize("")
    return ray


def start_local(ray: Any, num_cpus: int | None = None) -> None:
    """Start a cluster on this machine: loopback only, no dashboard, its own token.

    Raises: RunError.
    """
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file())
    # Without this, Ray listens on the address that other machines see. Ray's processes read the
    # variable; this process has read it already.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    python_path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import what this process can
    try:
        with _silent_stderr():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:
        raise RunError(f"Ray did not start on this machine: {first_line(error)}") from error
    finally:
        os.environ["PYTHONPATH"] = python_path


def join(ray: Any, address: str) -> None:
    """Connect to the cluster at host:port. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WrongValue(
            f"cluster.address={address} is not host:port; `ray start --head` prints it, "
            "e.g. 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise Unreachable(
            f"cluster.address={address} does not answer ({error}); start it with ray start --head"
        ) from error
    try:
        with _silent_stderr():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        raise Unreachable(
            f"cluster.address={address} refuses the connection ({first_line(error)}); check that "
            "it is Ray, and give the cluster's token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


@cache
def token_file() -> Path:
    """Return the file with this process's token, which only this user can read.

    One per process: Ray reads the token once, so all clusters of a process share it.
    """
    _remove_stale_tokens()
    folder = tempfile.TemporaryDirectory(prefix=TOKEN_PREFIX)  # mode 700
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "token"
    file = acquire_lock(path)  # the lock ends with the process, even after a kill
    atexit.register(file.close)
    file.write(secrets.token_hex(32))
    file.flush()
    path.chmod(0o600)
    return path


def _remove_stale_tokens() -> None:
    """Remove the token folders of killed processes: not locked, and older than START_S.

    A younger file may belong to a process that has not locked it yet.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{TOKEN_PREFIX}*/token"):
        try:
            status = path.stat()
            is_old = time.time() - status.st_mtime > START_S
            if status.st_uid == os.getuid() and is_old and not is_locked(path):
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # another process has removed it
            continue


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restores the SIGTERM handler that Ray replaces; SIGTERM in the block acts like Ctrl-C.

    Ray's handler would exit the process without a message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Redirects stderr to /dev/null: Ray's core writes there at any log level; failures raise."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with Path(os.devnull).open("w") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
