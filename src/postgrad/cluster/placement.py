"""Where Ray puts actors: devices of one node for workers that divide a model among them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from postgrad.cluster.ray_resources import actor_bundle
from postgrad.errors import ConfigError, RunError

CHECK_S = 1.0  # between two checks of the cluster while actors wait for a node
PLACE_S = 120.0  # time limit to find a node with free devices and to start a process there
# Placement: options of an actor that put it on its reserved device.
Placement = dict[str, Any]


@contextmanager
def reserve_groups(
    ray: Any,
    resources: Mapping[str, Any],
    num_groups: int,
    group_size: int,
    limit_s: float = PLACE_S,
) -> Iterator[list[Placement]]:
    """Yields the placements of num_groups x group_size workers; a group's workers share a node.

    `resources` are the options of one worker (ray_resources.py). The devices are released when
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
    """Raises ConfigError if the nodes of the cluster cannot hold the groups."""
    num_fitting = 0
    for node in ray.nodes():
        if node["Alive"]:
            per_resource = [
                int(node["Resources"].get(name, 0) // (amount * group_size))
                for name, amount in bundle.items()
            ]
            num_fitting += min(per_resource)
    if num_fitting < num_groups:
        raise ConfigError(
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
    """Returns Ray's state of an actor, such as ALIVE, and whether it has a process on a node.

    Ray's public list of actors needs the dashboard, which a cluster may not have.
    """
    found = ray._private.state.actors(handle._actor_id.hex())
    if not found:
        return "UNKNOWN", False
    return found["State"], bool(found["Address"]["IPAddress"])


def describe(bundle: Mapping[str, float], group_size: int = 1) -> str:
    """Returns what a group of workers needs, e.g. `2 GPU and 2 CPU`."""
    return " and ".join(f"{amount * group_size:g} {name}" for name, amount in bundle.items())
