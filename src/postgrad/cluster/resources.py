"""CPU cores, GPUs and NPUs of actors on Ray; devices of one node for those that divide a model."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import RunError, TooLarge
from postgrad.model.device import is_gpu

NPU = "NPU"  # Ray's name of an Ascend device, which is a custom resource
VERIFIER = "verifier"  # the name in cluster.pools of the actors that run verifiers
VERIFIER_WORKERS = 2  # child processes of such an actor if reward.workers is 0
CHECK_S = 1.0  # between two checks of the cluster while actors wait for a node
PLACE_S = 120.0  # time limit to find a node with free devices and to start a process there
# Placement: options of an actor that put it on its reserved device.
Placement = dict[str, Any]


def actor_resources(
    config: Config | EngineConfig, name: str, cluster: dict[str, float]
) -> dict[str, Any]:
    """Return the options of an actor: one GPU or NPU, or one CPU core per thread.

    A verifier actor needs one core per child process. If the cluster has a custom resource
    called `name`, the actor needs one of it, so that users can choose the actor's node.
    """
    if name == VERIFIER and isinstance(config, Config):
        resources: dict[str, Any] = {"num_gpus": 0, "num_cpus": verifier_workers(config)}
    elif is_gpu(config.model.device):
        resources = {"num_gpus": 1, "num_cpus": 1}
    elif config.model.device == "npu":
        resources = {"num_gpus": 0, "num_cpus": 1, "resources": {NPU: 1}}
    else:
        resources = {"num_gpus": 0, "num_cpus": config.model.threads}
    if name in cluster:
        resources["resources"] = {**resources.get("resources", {}), name: 1}
    return resources


def verifier_workers(config: Config) -> int:
    """Return the number of child processes of a verifier actor."""
    return config.reward.workers or VERIFIER_WORKERS


def actor_bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """Return what an actor with these options needs, by Ray's names of the resources."""
    bundle = {"GPU": options["num_gpus"], "CPU": options["num_cpus"]}
    bundle |= options.get("resources", {})
    return {name: amount for name, amount in bundle.items() if amount}


def count_actors(config: Config | EngineConfig) -> int:
    """Return the number of actors with a model: of a run, or of engines alone."""
    cluster = config.cluster
    group_size = config.rollout.tensor_parallel  # actors per engine
    if isinstance(config, Config):
        pools = [size for name, size in cluster.pools.items() if name != VERIFIER]
        return cluster.workers + cluster.engines * group_size + sum(pools)
    return (cluster.engines or cluster.workers // group_size) * group_size


def check_capacity(ray: Any, config: Config | EngineConfig) -> None:
    """Raise ConfigError if the cluster is too small; Ray itself would wait forever.

    Counts the nodes that Ray takes for alive: a dead one is among them for up to 20 seconds.
    """
    num_actors = count_actors(config)
    per_actor = actor_resources(config, "", {})
    per_verifier = actor_resources(config, VERIFIER, {})
    num_verifiers = config.cluster.pools.get(VERIFIER, 0) if isinstance(config, Config) else 0
    available = ray.cluster_resources()
    for resource, label in (("GPU", "GPUs"), (NPU, "NPUs"), ("CPU", "CPU cores")):
        needed = num_actors * actor_bundle(per_actor).get(resource, 0)
        needed += num_verifiers * actor_bundle(per_verifier).get(resource, 0)
        if needed > available.get(resource, 0.0):
            raise TooLarge(
                f"{num_actors + num_verifiers} workers (cluster.workers={config.cluster.workers}, "
                f"cluster.engines={config.cluster.engines}, "
                f"rollout.tensor_parallel={config.rollout.tensor_parallel} "
                f"and cluster.pools) need {needed:g} "
                f"{label}, the Ray cluster has {available.get(resource, 0.0):g}; "
                "use fewer, or join a larger cluster with cluster.address",
                at="cluster.workers",
            )


@contextmanager
def reserve_groups(
    ray: Any,
    resources: Mapping[str, Any],
    num_groups: int,
    group_size: int,
    limit_s: float = PLACE_S,
) -> Iterator[list[Placement]]:
    """Yield the placements of num_groups x group_size workers; a group's workers share a node.

    `resources` are the options of one worker (actor_resources). The devices are released when
    the block ends. Groups of one worker need no reservation: there are no placements then.

    Raises: ConfigError if the nodes are too small; RunError if the devices stay in use.
    """
    if group_size == 1:
        yield []
        return
    bundle = actor_bundle(resources)
    check_nodes(ray, bundle, num_groups, group_size)
    groups: list[Any] = []
    try:
        for _ in range(num_groups):
            bundles = [bundle] * group_size
            groups.append(ray.util.placement_group(bundles, strategy="STRICT_PACK"))
        deadline = time.monotonic() + limit_s
        for group in groups:
            while not group.wait(CHECK_S):
                check_nodes(ray, bundle, num_groups, group_size)  # a node may have died
                if time.monotonic() > deadline:
                    raise RunError(
                        f"rollout.tensor_parallel={group_size}: no node of the Ray cluster had "
                        f"{describe(bundle, group_size)} free within {limit_s:g} s; "
                        "`ray status` shows what other programs use"
                    )
        yield [_placement(group, index) for group in groups for index in range(group_size)]
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)


def check_nodes(ray: Any, bundle: Mapping[str, float], num_groups: int, group_size: int) -> None:
    """Raise ConfigError if the nodes of the cluster cannot hold the groups."""
    num_fitting = 0
    for node in ray.nodes():
        if node["Alive"]:
            per_resource = [
                int(node["Resources"].get(name, 0) // (amount * group_size))
                for name, amount in bundle.items()
            ]
            num_fitting += min(per_resource)
    if num_fitting < num_groups:
        raise TooLarge(
            f"rollout.tensor_parallel={group_size}: the {group_size} workers of an engine share a "
            f"node and need {describe(bundle, group_size)}; the nodes of the Ray cluster have "
            f"room for {num_fitting} of {num_groups} engines; lower rollout.tensor_parallel, "
            "cluster.workers or cluster.engines, or join a larger cluster with cluster.address"
        )


def _placement(group: Any, index: int) -> Placement:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy}


def actor_state(ray: Any, handle: Any) -> tuple[str, bool]:
    """Return Ray's state of an actor, such as ALIVE, and whether it has a process on a node.

    Ray's public list of actors needs the dashboard, which a cluster may not have.
    """
    found = ray._private.state.actors(handle._actor_id.hex())
    if not found:
        return "UNKNOWN", False
    return found["State"], bool(found["Address"]["IPAddress"])


def describe(bundle: Mapping[str, float], group_size: int = 1) -> str:
    """Return what a group of workers needs, e.g. `2 GPU and 2 CPU`."""
    return " and ".join(f"{amount * group_size:g} {name}" for name, amount in bundle.items())
