"""Where models live: in this process, in child processes or on a Ray cluster, behind the same ports. Methods cannot tell.

host.py builds models from the configuration; process.py reaches a host in a child, ray_place.py ranks and engines on Ray (their side is
rank.py); wire.py is what crosses; elsewhere.py knows the roles that no host loads. May touch methods, rollout, model and below; the
driver asks `place` for its ports.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from postgrad.cluster.engines import served_engine, shares_weights
from postgrad.cluster.host import SPEAKING
from postgrad.cluster.remote_roles import FAKE, is_elsewhere, is_served, served
from postgrad.config.schema import Config
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.base import LIVE, Role
from postgrad.model.load import load_tokenizer, model_config
from postgrad.model.policy import Policy
from postgrad.rollout.engine import Engine
from postgrad.rollout.fake import FakeEngine
from postgrad.rollout.generator import Chat, Generator
from postgrad.rollout.http import Address, HttpChat, HttpEngine


class Placed(NamedTuple):
    """The models of a run behind their ports; `models` are those its method asked for, by role."""

    policy: Policy
    engine: Engine
    models: dict[str, Any]


@contextmanager
def place(config: Config) -> Iterator[Placed]:
    """The models of a run, wherever cluster.* says they live; gone when the context ends."""
    roles = find_method(config.method.name)(config).models_wanted()
    if config.cluster.backend == "local":
        from postgrad.cluster.host import build_host

        host = build_host(config)
        engine = host.engine or served_engine(config, trains=True)
        yield Placed(host.policy, engine, _with_speakers(config, roles, engine, host.models))
        return
    if config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import place_on_ray

        with place_on_ray(config, roles) as (policy, engine, models):
            yield Placed(policy, engine, _with_speakers(config, roles, engine, models))
        return
    from postgrad.cluster.child_process import Child, RemoteEngine, RemoteModel

    children = [Child(config, "policy")]
    try:
        if config.cluster.engine_apart:
            children.append(Child(config, "engine", only_engine=True))
        if config.rollout.engine == "http":
            engine = served_engine(config, trains=True)
        else:
            engine = RemoteEngine(children[-1], shares_weights=shares_weights(config))
        models = {
            name: RemoteEngine(children[0], False, name)
            if role.kind in SPEAKING
            else RemoteModel(children[0], name)
            for name, role in roles.items()
            if not is_elsewhere(role.path)
        }
        yield Placed(
            RemoteModel(children[0], "policy"),
            engine,
            _with_speakers(config, roles, engine, models),
        )
    finally:
        for child in children:
            child.close()


@contextmanager
def place_engine(config: Config) -> Iterator[Engine]:
    """Only the engine of a configuration, for whom nothing is to be trained; gone when the context ends."""
    if config.rollout.engine == "http":
        yield served_engine(config, trains=False)
        return
    if config.cluster.backend == "local":
        from postgrad.cluster.host import build_host

        yield build_host(config, only_engine=True).engine
        return
    if config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import engine_on_ray

        with engine_on_ray(config) as engine:
            yield engine
        return
    from postgrad.cluster.child_process import Child, RemoteEngine

    child = Child(config, "engine", only_engine=True)
    try:
        yield RemoteEngine(child, shares_weights=False)
    finally:
        child.close()


def place_chat(config: Config, path: str, engine: Engine) -> Chat:
    """Who answers messages at a role's path, without the rest of a run: behind a server, `engine` itself, or a model loaded here."""
    from postgrad.cluster.host import build_role

    role = Role("chat", path)
    method = find_method(config.method.name)(config)
    return _speaker(
        config,
        role,
        engine,
        None if is_elsewhere(path) else build_role(config, method, "judge", role),
    )


def _with_speakers(
    config: Config, roles: dict[str, Role], engine: Engine, models: dict[str, Any]
) -> dict[str, Any]:
    """The roles' models, those that continue text together with their own tokenizer, wherever they are."""
    out = dict(models)
    for name, role in roles.items():
        if role.kind in SPEAKING:
            try:
                out[name] = _speaker(config, role, engine, models.get(name))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    return out


def _speaker(config: Config, role: Role, engine: Engine, model: Any) -> Any:
    if is_served(role.path):
        return _served_speaker(config, role)
    path = config.model.path if not role.path or is_elsewhere(role.path) else role.path
    found = dataclasses.replace(config.model, path=path)
    prompts = Prompts(load_tokenizer(found, config.seed), config.data.template)
    if role.path.startswith(FAKE):
        said = prompts.encode_response(role.path.removeprefix(FAKE))
        return Generator(FakeEngine(lambda prompt, seed: said), prompts)
    context = int(model_config(found, config.seed).get_text_config().max_position_embeddings)
    return Generator(engine if role.path == LIVE else model, prompts, context)


def _served_speaker(config: Config, role: Role) -> Any:
    address, tokenizer = served(role.path)
    if role.kind == "chat":
        return HttpChat(Address.of(address), config.cluster.wait_s, config.reward.judge.concurrency)
    try:
        found = load_tokenizer(dataclasses.replace(config.model, path=tokenizer), config.seed)
    except ConfigError as error:
        hint = "say where its tokenizer is: http://host:8000/v1?tokenizer=PATH#model"
        raise ConfigError(f"no tokenizer for the served model ({error}); {hint}") from error
    prompts = Prompts(found, config.data.template)
    served_engine = HttpEngine(
        Address.of(address), prompts, config.cluster.wait_s, min(64, config.rollout.max_rows)
    )
    return Generator(served_engine, prompts, served_engine.max_context)
