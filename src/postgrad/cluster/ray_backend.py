"""Opens the models of a run, or engines alone, on a Ray cluster."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

from postgrad.cluster.engine_pool import EnginePool
from postgrad.cluster.engines import (
    build_remote_engine,
    engine_config,
    is_remote,
    shares_weights,
)
from postgrad.cluster.host import GENERATING
from postgrad.cluster.placement import Placement, reserve_groups
from postgrad.cluster.ports import ENGINE, POLICY
from postgrad.cluster.ray_connection import connect
from postgrad.cluster.ray_resources import VERIFIER, actor_resources, check_capacity
from postgrad.cluster.remote_ports import RemoteEngine, RemoteModel
from postgrad.cluster.remote_roles import is_remote_role
from postgrad.cluster.verifier_pool import RayVerifierPool
from postgrad.cluster.worker_group import WorkerGroup
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError
from postgrad.methods.ports import Role


@contextmanager
def open_models_on_ray(
    config: Config, roles: dict[str, Role]
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yields the policy, the engine and the models by role.

    A role in cluster.pools has its own workers; the others share the policy's. With a pool
    called `verifier`, the models include the verifier pool under that name.

    Raises: ConfigError for a pool without a role, or a cluster that is too small.
    """
    loaded = {name: role for name, role in roles.items() if not is_remote_role(role.path)}
    pools = {name: size for name, size in config.cluster.pools.items() if name != VERIFIER}
    for name in pools:
        if name not in loaded:
            raise ConfigError(
                f"cluster.pools.{name}: this run has no such role; "
                f"give one of {', '.join([*loaded, VERIFIER])}"
            )
    num_engines = config.cluster.engines
    group_size = config.rollout.tensor_parallel  # workers per engine
    with ExitStack() as stack:
        ray = stack.enter_context(connect(config))
        check_capacity(ray, config)
        # Reserved before any worker starts: workers elsewhere could leave no node with room.
        label = ENGINE if num_engines else POLICY
        placements = stack.enter_context(_reserve(ray, config, label))
        own_names = [name for name in loaded if name not in pools]
        has_own_engine = not num_engines and not is_remote(config)
        group_ports = [POLICY, *([ENGINE] if has_own_engine else []), *own_names]
        group = WorkerGroup(
            ray,
            config,
            POLICY,
            config.cluster.workers,
            group_ports,
            () if num_engines else placements,
        )
        stack.enter_context(closing(group))
        models = {name: _make_port(group, name, loaded[name]) for name in own_names}
        for name, size in pools.items():
            pool_class = EnginePool if loaded[name].kind in GENERATING else WorkerGroup
            pool = stack.enter_context(closing(pool_class(ray, config, name, size, [name])))
            models[name] = _make_port(pool, name, loaded[name])
        engine: Any = RemoteEngine(group, shares_weights(config))
        if num_engines:
            settings = engine_config(config)
            ports = [ENGINE]
            engines = EnginePool(ray, settings, ENGINE, num_engines, ports, placements, group_size)
            stack.enter_context(closing(engines))
            engine = RemoteEngine(engines, shares_weights=False)
        if VERIFIER in config.cluster.pools:
            models[VERIFIER] = stack.enter_context(closing(RayVerifierPool(ray, config)))
        if is_remote(config):
            engine = build_remote_engine(config)
        yield RemoteModel(group, POLICY), engine, models


@contextmanager
def open_engine_on_ray(config: EngineConfig) -> Iterator[Any]:
    """Yields engines behind one port: cluster.engines of them, or else on all cluster.workers."""
    group_size = config.rollout.tensor_parallel
    size = config.cluster.engines or config.cluster.workers // group_size
    with connect(config) as ray:
        check_capacity(ray, config)
        with (
            _reserve(ray, config, ENGINE) as placements,
            closing(
                EnginePool(ray, config, ENGINE, size, [ENGINE], placements, group_size)
            ) as engines,
        ):
            yield RemoteEngine(engines, shares_weights=False)


def _reserve(
    ray: Any, config: Config | EngineConfig, label: str
) -> AbstractContextManager[list[Placement]]:
    """Reserves the devices of divided engines: separate ones, or those of the policy's workers."""
    cluster = config.cluster
    group_size = config.rollout.tensor_parallel
    resources = actor_resources(config, label, ray.cluster_resources())
    num_groups = cluster.engines or cluster.workers // group_size
    return reserve_groups(ray, resources, num_groups, group_size)


def _make_port(pool: Any, name: str, role: Role) -> Any:
    if role.kind in GENERATING:
        return RemoteEngine(pool, shares_weights=False, role=name)
    return RemoteModel(pool, name)
