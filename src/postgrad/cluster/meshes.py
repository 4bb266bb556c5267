"""The mesh of each group of workers: the policy's, and those of the roles with a pool."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from postgrad.cluster.ports import POLICY, is_remote_role
from postgrad.config.schema import ClusterConfig, Config
from postgrad.errors import ConfigError, NoEffect
from postgrad.methods.ports import Role
from postgrad.model.load.load import model_config
from postgrad.model.parallel.ranks import SHARDED_KINDS, check_mesh, mesh_of_models


def worker_mesh(
    config: Config, roles: Mapping[str, Role], port_names: Sequence[str], size: int
) -> ClusterConfig:
    """Return the settings of the mesh of `size` workers that hold these ports."""
    is_pool = POLICY not in port_names
    models = _sharded_models(config, roles, port_names)
    return mesh_of_models(config.cluster, size, models, is_pool)


def check_meshes(config: Config, roles: Mapping[str, Role]) -> None:
    """Check the mesh of the policy's workers, and that of each role with a pool.

    Raises: ConfigError if the sizes do not divide the workers, or if no model has experts to
    divide.
    """
    cluster = config.cluster
    local = {name: role for name, role in roles.items() if not is_remote_role(role.path)}
    groups = {POLICY: [POLICY, *(name for name in local if name not in cluster.pools)]}
    groups |= {name: [name] for name in local if name in cluster.pools}
    has_experts = False
    for name, port_names in groups.items():
        size = cluster.workers if name == POLICY else cluster.pools[name]
        own = worker_mesh(config, roles, port_names, size)
        has_experts = has_experts or own.expert_parallel > 1
        try:
            check_mesh(size, own)
        except ConfigError as error:
            if name == POLICY:
                raise
            raise error.reworded(f"cluster.pools.{name}={size}: {error}") from error
    if cluster.expert_parallel > 1 and not has_experts:
        raise NoEffect(
            f"cluster.expert_parallel={cluster.expert_parallel}: no model of this run has experts; "
            "remove it"
        )


def _sharded_models(
    config: Config, roles: Mapping[str, Role], port_names: Sequence[str]
) -> list[Any]:
    """Return the transformers configurations of the ports that are sharded over the workers."""
    paths: list[str] = []
    for name in port_names:
        if name == POLICY:
            paths.append(config.model.path)
        elif name in roles and roles[name].kind in SHARDED_KINDS:
            paths.append(roles[name].path or config.model.path)
    settings = [replace(config.model, path=path) for path in dict.fromkeys(paths)]
    return [model_config(model, config.seed) for model in settings]
