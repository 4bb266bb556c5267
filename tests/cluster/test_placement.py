"""Workers of a divided engine: which nodes have room for them."""

import time
from types import SimpleNamespace

import pytest
from refused import refused

from postgrad.cluster.resources import actor_bundle, check_nodes, reserve_groups
from postgrad.errors import RunError

WORKER = {"num_gpus": 1, "num_cpus": 1}


class FakeGroup:
    def __init__(self, ray, bundles, strategy):
        self.ray = ray
        self.bundles = bundles
        self.strategy = strategy

    def wait(self, seconds):
        self.ray.gpus = self.ray.gpus[: self.ray.num_left]
        time.sleep(0.01)
        return self.ray.is_free


class FakeRay:
    """Nodes with some GPUs each; keeps the placement groups that exist.

    `num_left`: how many nodes are left at the first wait for a placement group.
    """

    def __init__(self, *gpus: int, is_free: bool = True, num_left: int | None = None) -> None:
        self.num_left = num_left
        self.gpus = gpus
        self.groups: list[FakeGroup] = []
        self.is_free = is_free
        self.util = SimpleNamespace(
            placement_group=self.add, remove_placement_group=self.groups.remove
        )

    def add(self, bundles, strategy):
        self.groups.append(FakeGroup(self, bundles, strategy))
        return self.groups[-1]

    def nodes(self):
        down = {"Alive": False, "Resources": {"GPU": 64.0, "CPU": 64.0}}
        up = [{"Alive": True, "Resources": {"GPU": float(n), "CPU": 8.0}} for n in self.gpus]
        return [down, *up]


@pytest.mark.parametrize(
    ("gpus", "num_groups", "group_size", "fits"),
    [
        ((4,), 1, 4, True),
        ((4,), 2, 2, True),
        ((3, 3), 2, 2, True),
        ((3, 3), 3, 2, False),  # six GPUs, but the last pair would be on two nodes
        ((2, 2), 1, 4, False),
        ((16,), 1, 16, False),  # eight CPU cores
    ],
)
def test_the_workers_of_an_engine_share_a_node(gpus, num_groups, group_size, fits):
    bundle = actor_bundle(WORKER)
    if fits:
        check_nodes(FakeRay(*gpus), bundle, num_groups, group_size)
        return
    with refused("too_large", "rollout.tensor_parallel"):
        check_nodes(FakeRay(*gpus), bundle, num_groups, group_size)


def test_devices_are_reserved_and_released():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")
    ray = FakeRay(2, 2)
    with reserve_groups(ray, WORKER, 2, 2) as placements:
        assert [(g.bundles, g.strategy) for g in ray.groups] == [
            ([{"GPU": 1, "CPU": 1}] * 2, "STRICT_PACK")
        ] * 2
        strategies = [placement["scheduling_strategy"] for placement in placements]
        assert [(s.placement_group, s.placement_group_bundle_index) for s in strategies] == [
            (group, index) for group in ray.groups for index in (0, 1)
        ]
    assert not ray.groups


def test_devices_that_stay_in_use_end_the_run_and_nothing_stays_reserved():
    ray = FakeRay(2, is_free=False)
    with (
        pytest.raises(RunError, match=r"2 GPU and 2 CPU free"),
        reserve_groups(ray, WORKER, 1, 2, 0.05),
    ):
        pass
    assert not ray.groups


def test_a_node_that_dies_before_its_devices_are_reserved_is_noticed():
    ray = FakeRay(2, 2, is_free=False, num_left=1)
    no_room = refused("too_large", "rollout.tensor_parallel", shows=r"room for 1 of 2 engines")
    with no_room, reserve_groups(ray, WORKER, 2, 2):
        pass
    assert not ray.groups


def test_an_engine_of_one_worker_needs_no_reservation():
    ray = FakeRay()
    with reserve_groups(ray, WORKER, 3, 1) as placements:
        assert placements == [] and not ray.groups
