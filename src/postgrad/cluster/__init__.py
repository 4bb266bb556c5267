"""Where models live: in this process or in child processes, behind the same ports. Methods cannot tell.

host.py builds models from the configuration; process.py reaches a host in a child; wire.py is what crosses. May touch methods,
rollout, model and below; the driver asks `place` for its ports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from postgrad.config.schema import Config
from postgrad.model.policy import Policy
from postgrad.rollout.engine import Engine


class Placed(NamedTuple):
    """The models of a run behind their ports; `models` are those its method asked for, by role."""

    policy: Policy
    engine: Engine
    models: dict[str, Any]


@contextmanager
def place(config: Config) -> Iterator[Placed]:
    """The models of a run, wherever cluster.* says they live; gone when the context ends."""
    if config.cluster.place == "local":
        from postgrad.cluster.host import build_host

        host = build_host(config)
        yield Placed(host.policy, host.engine, host.models)
        return
    from postgrad.cluster.process import Child, RemoteEngine, RemoteModel
    from postgrad.methods import find_method

    children = [Child(config, "policy")]
    try:
        if config.cluster.engine_apart:
            children.append(Child(config, "engine", only_engine=True))
        roles = find_method(config.method.name)(config).roles()
        engine = RemoteEngine(children[-1], shares_weights=not config.cluster.engine_apart)
        yield Placed(RemoteModel(children[0], "policy"), engine, {name: RemoteModel(children[0], name) for name in roles})
    finally:
        for child in children:
            child.close()
