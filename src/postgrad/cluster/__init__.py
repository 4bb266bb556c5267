"""Where models live: in this process or in child processes, behind the same ports. Methods cannot tell.

host.py builds models from the configuration; process.py reaches a host in a child; wire.py is what crosses. May touch methods,
rollout, model and below; the driver asks `place` for its ports.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from postgrad.config.schema import Config
from postgrad.model.policy import Policy
from postgrad.rollout.engine import Engine


@contextmanager
def place(config: Config) -> Iterator[tuple[Policy, Engine]]:
    """The policy and the engine of a run, wherever cluster.* says they live; gone when the context ends."""
    if config.cluster.place == "local":
        from postgrad.cluster.host import build_host

        host = build_host(config)
        yield host.policy, host.engine
        return
    from postgrad.cluster.process import Child, RemoteEngine, RemotePolicy

    children = [Child(config, "policy")]
    try:
        if config.cluster.engine_apart:
            children.append(Child(config, "engine"))
        yield RemotePolicy(children[0]), RemoteEngine(children[-1], shares_weights=not config.cluster.engine_apart)
    finally:
        for child in children:
            child.close()
