"""A host's side of the ports: which methods can be called, and how a call's failure becomes words. Run as a program, the child process.

The child builds a host from the configuration that the driver sends first, then answers calls until the driver closes the connection.
"""

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from safetensors import SafetensorError

from postgrad.cluster.child_process import OURS, receive, send
from postgrad.cluster.wire import encode
from postgrad.errors import ConfigError, RunError

# What each kind of port answers; nothing else of an object can be reached.
PORTS = {
    "policy": (
        "logprobs",
        "update",
        "token_stats",
        "weights",
        "save",
        "load",
        "begin_save",
        "saved",
    ),
    "engine": ("generate", "publish"),
    "chat": ("generate",),
    "frozen": ("logprobs",),
    "critic": ("values", "update", "save", "load", "begin_save", "saved"),
}

Ports = dict[str, tuple[str, Any]]  # each port's name with its kind and its object


def serve(descriptor: int, build: Callable[[str], Ports]) -> None:
    from postgrad.cluster.wire import decode

    for number in OURS:
        signal.signal(
            number, lambda *_: None
        )  # not SIG_IGN, which programs started from here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
    connection = socket.socket(fileno=descriptor)
    config = receive(connection, None)
    if config is None:
        return
    with suppress(ConnectionError):  # the driver was killed: nobody is left to answer
        kind, ports = attempt(lambda: build(config.decode()))
        send(connection, encode([kind, None if kind == "ok" else ports]))
        while kind == "ok" and (data := receive(connection, None)) is not None:
            port, method, arguments = decode(data)
            send(connection, encode(answer(ports, port, method, arguments)))


def answer(ports: Ports, port: str, method: str, arguments: list[Any]) -> tuple[str, Any]:
    """Call a method of a port: ("ok", what it returned), or its failure as words."""
    kind, target = ports.get(port, ("", None))
    if method not in PORTS.get(kind, ()):
        return "error", f"no port method {port}.{method}"
    return attempt(lambda: getattr(target, method)(*arguments))


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """("ok", the result), or ("config", words) for the user's mistake, or ("error", words) for the rest."""
    try:
        return "ok", work()
    except ConfigError as error:
        return "config", str(error)
    except RunError as error:
        return "error", str(error)
    except (OSError, SafetensorError) as error:  # a full disk, a damaged file: the words are enough
        return "error", f"{type(error).__name__}: {error}"
    except Exception as error:  # the driver raises it again; a traceback for people goes to stderr
        import traceback

        traceback.print_exc()
        return "error", f"{type(error).__name__}: {error}"


def _build_engine(text: str) -> Ports:
    """The port of an engine alone, from the YAML of an EngineConfig."""
    from postgrad.cluster.engines import load_engine, read_engine_config

    return {"engine": ("engine", load_engine(read_engine_config(text)).engine)}


def _build_run(text: str) -> Ports:
    """The ports of all models of a run, from the YAML of its Config."""
    from postgrad.cluster.host import build_host
    from postgrad.config.compose import from_yaml
    from postgrad.methods import find_method

    config = from_yaml(text, lambda name: find_method(name).Settings)
    host = build_host(config)
    roles = find_method(config.method.name)(config).all_roles()
    ports: Ports = {name: (roles[name].kind, model) for name, model in host.models.items()}
    return ports | {"policy": ("policy", host.policy), "engine": ("engine", host.engine)}


if __name__ == "__main__":
    serve(int(sys.argv[1]), {"engine": _build_engine, "run": _build_run}[sys.argv[2]])
