"""The program of a child process: builds the models, then answers calls until the driver closes.

The last argument is what it holds: run or engine. The driver's first message is the configuration
as YAML.
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
    build = BUILDERS[sys.argv[3]]
    status, ports = attempt(lambda: build(config.decode()))
    if status != "ok":
        channel.send(encode([status, ports]))
        return
    channel.send(encode(["ok", None]))
    while (data := channel.receive()) is not None:
        port, method, arguments = decode(data)
        channel.send(encode(call_port(ports, port, method, arguments)))


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
    config.method.freeze()
    host = build_host(config)
    roles = find_method(config.method.name)(config).all_roles()
    ports: Ports = {name: (roles[name].kind, model) for name, model in host.models.items()}
    ports["policy"] = ("policy", host.policy)
    ports["engine"] = ("engine", host.engine)
    return ports


BUILDERS = {"engine": build_engine, "run": build_run}

if __name__ == "__main__":
    run_child(main)
