"""Where models live: in this process, in child processes or on a Ray cluster, behind the same ports. Methods cannot tell.

host.py builds models from the configuration; process.py reaches a host in a child, ray_place.py ranks and engines on Ray (their side is
rank.py); wire.py is what crosses; elsewhere.py knows the roles that no host loads. May touch methods, rollout, model and below; the
driver asks `place` for its ports.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from postgrad.cluster.engines import (
    build_remote_engine,
    engine_config,
    is_remote,
    load_engine,
    shares_weights,
)
from postgrad.cluster.host import SPEAKING, load_role
from postgrad.cluster.remote_roles import FAKE, is_elsewhere, is_served, served
from postgrad.config.schema import Config, EngineConfig
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
from postgrad.rollout.native.engine import NativeEngine


class Placed(NamedTuple):
    """The models of a run behind their ports; `models` are those its method asked for, by role."""

    policy: Policy
    engine: Engine
    models: dict[str, Any]


@contextmanager
def place(config: Config) -> Iterator[Placed]:
    """The models of a run, wherever cluster.* says they live; gone when the context ends."""
    roles = find_method(config.method.name)(config).all_roles()
    if config.cluster.backend == "local":
        from postgrad.cluster.host import build_host

        host = build_host(config)
        engine = host.engine or build_remote_engine(config)
        yield Placed(host.policy, engine, _with_generators(config, roles, engine, host.models))
        return
    if config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import place_on_ray

        with place_on_ray(config, roles) as (policy, engine, models):
            yield Placed(policy, engine, _with_generators(config, roles, engine, models))
        return
    from postgrad.cluster.child_process import Child, RemoteEngine, RemoteModel

    children = [Child(config, "policy")]
    try:
        if config.cluster.engine_apart:
            children.append(Child(engine_config(config), "engine"))
        engine: Engine = RemoteEngine(children[-1], shares_weights=shares_weights(config))
        if is_remote(config):
            engine = build_remote_engine(config)
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
            _with_generators(config, roles, engine, models),
        )
    finally:
        for child in children:
            child.close()


@contextmanager
def place_engine(config: EngineConfig) -> Iterator[Engine]:
    """Yield an engine alone, where nothing is trained; it is closed when the context ends."""
    if is_remote(config) or config.cluster.backend == "local":
        yield load_engine(config).engine
        return
    if config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import engine_on_ray

        with engine_on_ray(config) as engine:
            yield engine
        return
    from postgrad.cluster.child_process import Child, RemoteEngine

    child = Child(config, "engine")
    try:
        yield RemoteEngine(child, shares_weights=False)
    finally:
        child.close()


def place_chat(
    config: EngineConfig, path: str, engine: Engine, template: str, concurrency: int
) -> Chat:
    """Return the model that answers messages at a role's path, without the rest of a run.

    It is a server's model, `engine` itself, or a model that is loaded in this process.

    Args:
        config: the settings of the engine of the run or the evaluation.
        path: as of a role: a model path, http://host:8000/v1#model, policy:live, ...
        engine: the engine of the run or the evaluation.
        template: how messages become a prompt (data.template).
        concurrency: calls to a server at the same time.
    """
    role = Role("chat", path)
    model = None
    if not is_elsewhere(path):
        loaded = load_role(config, "judge", path)
        loaded.model.requires_grad_(False)
        model = NativeEngine(loaded, config.rollout)
    return _generator(config, role, engine, model, template, concurrency)


def _with_generators(
    config: Config, roles: dict[str, Role], engine: Engine, models: dict[str, Any]
) -> dict[str, Any]:
    """Return the roles' models; those that generate text become a Generator or a Chat."""
    settings = engine_config(config)
    concurrency = config.reward.judge.concurrency
    ports = dict(models)
    for name, role in roles.items():
        if role.kind not in SPEAKING:
            continue
        try:
            ports[name] = _generator(
                settings, role, engine, models.get(name), config.data.template, concurrency
            )
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return ports


def _generator(
    config: EngineConfig, role: Role, engine: Engine, model: Any, template: str, concurrency: int
) -> Any:
    if is_served(role.path):
        return _served_generator(config, role, template, concurrency)
    path = config.model.path if not role.path or is_elsewhere(role.path) else role.path
    model_settings = dataclasses.replace(config.model, path=path)
    prompts = Prompts(load_tokenizer(model_settings, config.seed), template)
    if role.path.startswith(FAKE):
        response = prompts.encode_response(role.path.removeprefix(FAKE))
        return Generator(FakeEngine(lambda prompt, seed: response), prompts)
    architecture = model_config(model_settings, config.seed).get_text_config()
    context = int(architecture.max_position_embeddings)
    return Generator(engine if role.path == LIVE else model, prompts, context)


def _served_generator(config: EngineConfig, role: Role, template: str, concurrency: int) -> Any:
    url, tokenizer_path = served(role.path)
    address = Address.parse(url)
    if role.kind == "chat":
        return HttpChat(address, config.cluster.wait_s, concurrency)
    try:
        tokenizer = load_tokenizer(
            dataclasses.replace(config.model, path=tokenizer_path), config.seed
        )
    except ConfigError as error:
        hint = "say where its tokenizer is: http://host:8000/v1?tokenizer=PATH#model"
        raise ConfigError(f"no tokenizer for the served model ({error}); {hint}") from error
    prompts = Prompts(tokenizer, template)
    num_calls = min(64, config.rollout.max_rows)
    http_engine = HttpEngine(address, prompts, config.cluster.wait_s, num_calls)
    return Generator(http_engine, prompts, http_engine.max_context)
