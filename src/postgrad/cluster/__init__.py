"""Where models live: in this process or in child processes, behind the same ports. Methods cannot tell.

host.py builds models from the configuration; process.py reaches a host in a child; wire.py is what crosses. May touch methods,
rollout, model and below; the driver asks `place` for its ports.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from postgrad.cluster.host import LIVE
from postgrad.config.schema import Config
from postgrad.data.render import Prompts
from postgrad.methods import find_method
from postgrad.methods.base import Role, Speaker
from postgrad.model.load import load_tokenizer
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
    roles = find_method(config.method.name)(config).roles()
    if config.cluster.place == "local":
        from postgrad.cluster.host import build_host

        host = build_host(config)
        yield Placed(host.policy, host.engine, _with_speakers(config, roles, host.engine, host.models))
        return
    from postgrad.cluster.process import Child, RemoteEngine, RemoteModel

    children = [Child(config, "policy")]
    try:
        if config.cluster.engine_apart:
            children.append(Child(config, "engine", only_engine=True))
        engine = RemoteEngine(children[-1], shares_weights=not config.cluster.engine_apart)
        models = {
            name: RemoteEngine(children[0], False, name) if role.kind == "engine" else RemoteModel(children[0], name)
            for name, role in roles.items()
        }
        yield Placed(RemoteModel(children[0], "policy"), engine, _with_speakers(config, roles, engine, models))
    finally:
        for child in children:
            child.close()


@contextmanager
def place_engine(config: Config) -> Iterator[Engine]:
    """Only the engine of a configuration, for whom nothing is to be trained; gone when the context ends."""
    if config.cluster.place == "local":
        from postgrad.cluster.host import build_host

        yield build_host(config, only_engine=True).engine
        return
    from postgrad.cluster.process import Child, RemoteEngine

    child = Child(config, "engine", only_engine=True)
    try:
        yield RemoteEngine(child, shares_weights=False)
    finally:
        child.close()


def _with_speakers(config: Config, roles: dict[str, Role], engine: Engine, models: dict[str, Any]) -> dict[str, Any]:
    """The roles' models, those that continue text together with their own tokenizer."""
    out = dict(models)
    for name, role in roles.items():
        if role.kind == "engine":
            path = config.model.path if role.path in ("", LIVE) else role.path
            tokenizer = load_tokenizer(dataclasses.replace(config.model, path=path), config.seed)
            out[name] = Speaker(engine if role.path == LIVE else models[name], Prompts(tokenizer, config.data.template))
    return out
