"""Opens the models of a run, or an engine alone, on the backend that cluster.backend names."""

from collections.abc import Iterator
from contextlib import contextmanager

from postgrad.cluster.ports import RunModels, is_remote_role
from postgrad.config.schema import Config, EngineConfig
from postgrad.methods import find_method
from postgrad.rollout.engine import Engine
from postgrad.user_code import import_named

# Backend -> opens the models of a run whose roles are loaded; no engine if a server samples.
OPEN_MODELS = {
    "local": "postgrad.cluster.host:open_local",
    "process": "postgrad.cluster.child_process:open_child_processes",
    "ray": "postgrad.cluster.ray_backend:open_models_on_ray",
}
# Backend -> opens an engine alone.
OPEN_ENGINE = {
    "local": "postgrad.cluster.engines:open_local_engine",
    "process": "postgrad.cluster.child_process:open_child_engine",
    "ray": "postgrad.cluster.ray_backend:open_engine_on_ray",
}


@contextmanager
def open_models(config: Config) -> Iterator[RunModels]:
    """Yield the models of a run; they are closed when the block ends.

    Raises: ConfigError for a model that cannot be loaded, RunError for a worker that is lost.
    """
    from postgrad.cluster.engines import build_remote_engine
    from postgrad.cluster.generators import add_generators

    roles = find_method(config.method.name)(config).all_roles()
    loaded = {name: role for name, role in roles.items() if not is_remote_role(role.path)}
    opener = import_named(OPEN_MODELS[config.cluster.backend])
    with opener(config, loaded) as (policy, engine, models):
        engine = engine or build_remote_engine(config)
        yield RunModels(policy, engine, add_generators(config, roles, engine, models))


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Yield an engine without a trained model; it is closed when the block ends."""
    from postgrad.cluster.engines import is_remote

    backend = "local" if is_remote(config) else config.cluster.backend
    with import_named(OPEN_ENGINE[backend])(config) as engine:
        yield engine
