"""Opens the models of a run, or engines alone, on a Ray cluster."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

from postgrad.cluster.engine_pool import EnginePool
from postgrad.cluster.engines import is_remote, shares_weights
from postgrad.cluster.ports import ENGINE, GENERATING, POLICY, RemotePort, RunModels
from postgrad.cluster.ray_connection import connect
from postgrad.cluster.resources import (
    VERIFIER,
    Placement,
    actor_resources,
    check_capacity,
    reserve_groups,
)
from postgrad.cluster.verifier_pool import RayVerifierPool
from postgrad.cluster.worker_group import WorkerGroup
from postgrad.config.schema import Config, EngineConfig, engine_config
from postgrad.errors import UnknownName
from postgrad.methods.ports import Role


@contextmanager
def open_models_on_ray(config: Config, roles: dict[str, Role]) -> Iterator[RunModels]:
    """Yield the policy, the engine and the models of `roles`.

    A role in cluster.pools has its own workers; the others share the policy's. With a pool
    called `verifier`, the models include the verifier pool under that name.

    Raises: ConfigError for a pool without a role, or a cluster that is too small.
    """
    cluster = config.cluster
    pools = {name: size for name, size in cluster.pools.items() if name != VERIFIER}
    for name in pools:
        if name not in roles:
            raise UnknownName(
                f"cluster.pools.{name}: this run has no such role; "
                f"give one of {', '.join([*roles, VERIFIER])}"
            )
    with ExitStack() as stack:

        def open_pool(pool: Any) -> Any:
            return stack.enter_context(closing(pool))

        ray = stack.enter_context(connect(config))
        check_capacity(ray, config)
        # Reserved before any worker starts: workers elsewhere could leave no node with room.
        label = ENGINE if cluster.engines else POLICY
        placements = stack.enter_context(_reserve(ray, config, label))
        shared = [name for name in roles if name not in pools]
        has_engine = not cluster.engines and not is_remote(config)
        names = [POLICY, *([ENGINE] if has_engine else []), *shared]
        places = [] if cluster.engines else placements
        group = open_pool(WorkerGroup(ray, config, POLICY, cluster.workers, names, places))
        callers: dict[str, Any] = dict.fromkeys(shared, group)
        for name, size in pools.items():
            pool_class = EnginePool if roles[name].kind in GENERATING else WorkerGroup
            callers[name] = open_pool(pool_class(ray, config, name, size, [name]))
        models: dict[str, Any] = {
            name: RemotePort(caller, name, roles[name].kind) for name, caller in callers.items()
        }
        engine: RemotePort | None = None
        if cluster.engines:
            engines = open_pool(_start_engines(ray, engine_config(config), placements))
            engine = RemotePort(engines, ENGINE, "engine")
        elif has_engine:
            engine = RemotePort(group, ENGINE, "engine", shares_weights(config))
        if VERIFIER in cluster.pools:
            models[VERIFIER] = open_pool(RayVerifierPool(ray, config))
        yield RunModels(RemotePort(group, POLICY, "policy"), engine, models)


@contextmanager
def open_engine_on_ray(config: EngineConfig) -> Iterator[Any]:
    """Yield engines behind one port: cluster.engines of them, or else on all cluster.workers."""
    with connect(config) as ray:
        check_capacity(ray, config)
        with (
            _reserve(ray, config, ENGINE) as placements,
            closing(_start_engines(ray, config, placements)) as engines,
        ):
            yield RemotePort(engines, ENGINE, "engine")


def _start_engines(ray: Any, config: EngineConfig, placements: list[Placement]) -> EnginePool:
    group_size = config.rollout.tensor_parallel  # workers per engine
    size = config.cluster.engines or config.cluster.workers // group_size
    return EnginePool(ray, config, ENGINE, size, [ENGINE], placements, group_size)


def _reserve(
    ray: Any, config: Config | EngineConfig, label: str
) -> AbstractContextManager[list[Placement]]:
    """Reserve the devices of divided engines: separate ones, or those of the policy's workers."""
    cluster = config.cluster
    group_size = config.rollout.tensor_parallel
    resources = actor_resources(config, label, ray.cluster_resources())
    num_groups = cluster.engines or cluster.workers // group_size
    return reserve_groups(ray, resources, num_groups, group_size)
