"""The program of a child process: builds the models, then answers calls until the driver closes.

Usage: python -m postgrad.cluster.child_main DESCRIPTOR run|engine
The driver's first message is the configuration as YAML.
"""

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from postgrad.cluster.connection import DRIVER_SIGNALS, receive, send
from postgrad.cluster.ports import Ports, attempt, call_port
from postgrad.cluster.wire import decode, encode


def serve(descriptor: int, build: Callable[[str], Ports]) -> None:
    """Answers the calls that arrive at the socket `descriptor`, with the ports of `build(yaml)`."""
    _ignore_driver_signals()
    connection = socket.socket(fileno=descriptor)
    config = receive(connection, None)
    if config is None:
        return
    with suppress(ConnectionError):  # the driver was killed
        status, ports = attempt(lambda: build(config.decode()))
        if status != "ok":
            send(connection, encode([status, ports]))
            return
        send(connection, encode(["ok", None]))
        while (data := receive(connection, None)) is not None:
            port, method, arguments = decode(data)
            send(connection, encode(call_port(ports, port, method, arguments)))


def _ignore_driver_signals() -> None:
    """The driver ends its step and saves on these signals, and needs this process for that."""
    for number in DRIVER_SIGNALS:
        # A handler and not SIG_IGN, which programs started from here would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVER_SIGNALS)


def build_engine(text: str) -> Ports:
    """Returns the port of an engine alone, from the YAML of an EngineConfig."""
    from postgrad.cluster.engines import load_engine, read_engine_config

    return {"engine": ("engine", load_engine(read_engine_config(text)).engine)}


def build_run(text: str) -> Ports:
    """Returns the ports of all models of a run, from the YAML of its Config."""
    from postgrad.cluster.host import build_host
    from postgrad.config.compose import from_yaml
    from postgrad.methods import find_method

    config = from_yaml(text, lambda name: find_method(name).Settings)
    host = build_host(config)
    roles = find_method(config.method.name)(config).all_roles()
    ports: Ports = {name: (roles[name].kind, model) for name, model in host.models.items()}
    ports["policy"] = ("policy", host.policy)
    ports["engine"] = ("engine", host.engine)
    return ports


BUILDERS = {"engine": build_engine, "run": build_run}

if __name__ == "__main__":
    serve(int(sys.argv[1]), BUILDERS[sys.argv[2]])
