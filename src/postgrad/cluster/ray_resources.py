"""CPU cores, GPUs and NPUs that each actor on Ray needs."""

from collections.abc import Mapping
from typing import Any

from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError
from postgrad.model.device import is_gpu

NPU = "NPU"  # Ray's name of an Ascend device, which is a custom resource
VERIFIER = "verifier"  # the name in cluster.pools of the actors that run verifiers
VERIFIER_WORKERS = 2  # child processes of such an actor if reward.workers is 0


def actor_resources(
    config: Config | EngineConfig, name: str, cluster: dict[str, float]
) -> dict[str, Any]:
    """Returns the options of an actor: one GPU or NPU, or one CPU core per thread.

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
    """Returns the number of child processes of a verifier actor."""
    return config.reward.workers or VERIFIER_WORKERS


def actor_bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """Returns what an actor with these options needs, by Ray's names of the resources."""
    bundle = {"GPU": options["num_gpus"], "CPU": options["num_cpus"]}
    bundle |= options.get("resources", {})
    return {name: amount for name, amount in bundle.items() if amount}


def count_actors(config: Config | EngineConfig) -> int:
    """Returns the number of actors with a model: of a run, or of engines alone."""
    cluster = config.cluster
    group_size = config.rollout.tensor_parallel  # actors per engine
    if isinstance(config, Config):
        pools = [size for name, size in cluster.pools.items() if name != VERIFIER]
        return cluster.workers + cluster.engines * group_size + sum(pools)
    return (cluster.engines or cluster.workers // group_size) * group_size


def check_capacity(ray: Any, config: Config | EngineConfig) -> None:
    """Raises ConfigError if the cluster is too small; Ray itself would wait forever.

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
            raise ConfigError(
                f"{num_actors + num_verifiers} workers (cluster.workers={config.cluster.workers}, "
                f"cluster.engines={config.cluster.engines}, "
                f"rollout.tensor_parallel={config.rollout.tensor_parallel} "
                f"and cluster.pools) need {needed:g} "
                f"{label}, the Ray cluster has {available.get(resource, 0.0):g}; "
                "use fewer, or join a larger cluster with cluster.address"
            )
