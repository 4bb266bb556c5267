"""The program of a child process: builds the models, then answers calls until the driver closes.

The arguments are the names of its ports, none for all models of the run. The driver's first message
is the configuration as YAML.
"""

import sys

from postgrad.cluster.ports import Ports, attempt, call_port
from postgrad.cluster.wire import decode, encode
from postgrad.processes.channel import Channel
from postgrad.processes.program import run_child


def main(channel: Channel) -> None:
    """Answer the calls that arrive, with the ports that the configuration asks for."""
    config = channel.receive()
    if config is None:
        return
    status, ports = attempt(lambda: build(config.decode(), sys.argv[3:]))
    if status != "ok":
        channel.send(encode([status, ports]))
        return
    channel.send(encode(["ok", None]))
    while (data := channel.receive()) is not None:
        port, method, arguments = decode(data)
        channel.send(encode(call_port(ports, port, method, arguments)))


def build(text: str, names: list[str]) -> Ports:
    from postgrad.cluster.host import build_ports, read_config

    return build_ports(read_config(text, names), names)


if __name__ == "__main__":
    run_child(main)
