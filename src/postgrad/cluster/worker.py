"""The child's side: build a host from the configuration file, then answer calls until the driver closes the connection."""

import signal
import socket
import sys
from typing import Any

from postgrad.cluster.process import receive, send
from postgrad.cluster.wire import encode
from postgrad.errors import ConfigError, RunError

# What each kind of port answers; nothing else of an object can be reached.
PORTS = {
    "policy": ("logprobs", "update", "seen", "weights", "save", "load"),
    "engine": ("generate", "publish"),
    "chat": ("generate",),
    "frozen": ("logprobs",),
    "critic": ("values", "update", "save", "load"),
}


def serve(config_file: str, descriptor: int, only_engine: bool) -> None:
    from postgrad.cluster.wire import decode

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    connection = socket.socket(fileno=descriptor)
    ports = _answer(connection, lambda: _build(config_file, only_engine), reply=lambda _: None)
    while ports is not None and (data := receive(connection, None)) is not None:
        port, method, arguments = decode(data)
        kind, target = ports.get(port, ("", None))
        if method not in PORTS.get(kind, ()):
            send(connection, encode(["error", f"no port method {port}.{method}"]))
            continue
        _answer(connection, lambda target=target, method=method, arguments=arguments: getattr(target, method)(*arguments))


def _build(config_file: str, only_engine: bool) -> dict[str, tuple[str, Any]]:
    """Each port's name with its kind and its object."""
    from postgrad.cluster.host import build_host
    from postgrad.config.compose import compose
    from postgrad.methods import find_method

    config = compose(config_file, [], lambda name: find_method(name).Settings)
    host = build_host(config, only_engine)
    roles = find_method(config.method.name)(config).models_wanted()
    ports: dict[str, tuple[str, Any]] = {name: (roles[name].kind, model) for name, model in host.models.items()}
    return ports | {"policy": ("frozen" if only_engine else "policy", host.policy), "engine": ("engine", host.engine)}


def _answer(connection: socket.socket, work: Any, reply: Any = lambda value: value) -> Any:
    """Do the work and send its result; a failure goes to the driver as words, with its place."""
    try:
        value = work()
        send(connection, encode(["ok", reply(value)]))
        return value
    except ConfigError as error:
        send(connection, encode(["config", str(error)]))
    except RunError as error:
        send(connection, encode(["error", str(error)]))
    except Exception as error:  # the driver raises it again; a traceback for people goes to stderr
        import traceback

        traceback.print_exc()
        send(connection, encode(["error", f"{type(error).__name__}: {error}"]))
    return None


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
