"""Opens the models of a run, or an engine alone, on the backend that cluster.backend names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from postgrad.cluster.remote_roles import is_remote_role
from postgrad.config.schema import Config, EngineConfig
from postgrad.methods import find_method
from postgrad.methods.ports import Role
from postgrad.model.port import Policy
from postgrad.rollout.engine import Engine


class RunModels(NamedTuple):
    """The models of a run behind their ports; `models` are those of the method's roles."""

    policy: Policy
    engine: Engine
    models: dict[str, Any]


@contextmanager
def open_models(config: Config) -> Iterator[RunModels]:
    """Yields the models of a run; they are closed when the block ends.

    Raises: ConfigError for a model that cannot be loaded, RunError for a worker that is lost.
    """
    from postgrad.cluster.generators import add_generators

    roles = find_method(config.method.name)(config).all_roles()
    if config.cluster.backend == "local":
        with _open_local(config) as (policy, engine, models):
            yield RunModels(policy, engine, add_generators(config, roles, engine, models))
    elif config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import open_models_on_ray

        with open_models_on_ray(config, roles) as (policy, engine, models):
            yield RunModels(policy, engine, add_generators(config, roles, engine, models))
    else:
        with _open_child_processes(config, roles) as (policy, engine, models):
            yield RunModels(policy, engine, add_generators(config, roles, engine, models))


@contextmanager
def _open_local(config: Config) -> Iterator[tuple[Any, Engine, dict[str, Any]]]:
    from postgrad.cluster.engines import build_remote_engine
    from postgrad.cluster.host import build_host

    host = build_host(config)
    yield host.policy, host.engine or build_remote_engine(config), host.models


@contextmanager
def _open_child_processes(
    config: Config, roles: dict[str, Role]
) -> Iterator[tuple[Any, Engine, dict[str, Any]]]:
    """Yields the ports of one child process, or of two with cluster.engine_apart."""
    from postgrad.cluster.child_process import ChildProcess
    from postgrad.cluster.engines import (
        build_remote_engine,
        engine_config,
        is_remote,
        shares_weights,
    )
    from postgrad.cluster.host import GENERATING
    from postgrad.cluster.remote_ports import RemoteEngine, RemoteModel

    model_process = ChildProcess(config, "policy")
    processes = [model_process]
    try:
        if config.cluster.engine_apart:
            processes.append(ChildProcess(engine_config(config), "engine"))
        engine: Engine = RemoteEngine(processes[-1], shares_weights=shares_weights(config))
        if is_remote(config):
            engine = build_remote_engine(config)
        models: dict[str, Any] = {}
        for name, role in roles.items():
            if is_remote_role(role.path):
                continue
            if role.kind in GENERATING:
                models[name] = RemoteEngine(model_process, shares_weights=False, role=name)
            else:
                models[name] = RemoteModel(model_process, name)
        yield RemoteModel(model_process, "policy"), engine, models
    finally:
        for process in processes:
            process.close()


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Yields an engine without a trained model; it is closed when the block ends."""
    from postgrad.cluster.engines import is_remote, load_engine

    if is_remote(config) or config.cluster.backend == "local":
        yield load_engine(config).engine
    elif config.cluster.backend == "ray":
        from postgrad.cluster.ray_backend import open_engine_on_ray

        with open_engine_on_ray(config) as engine:
            yield engine
    else:
        from postgrad.cluster.child_process import ChildProcess
        from postgrad.cluster.remote_ports import RemoteEngine

        process = ChildProcess(config, "engine")
        try:
            yield RemoteEngine(process, shares_weights=False)
        finally:
            process.close()
