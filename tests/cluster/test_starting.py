"""Actors that wait for a node while the cluster changes: one line, long before cluster.wait_s.

Ray is replaced by a stand-in: it has the actor table and the resources that Ray 2.60 shows after a
node was killed, and the answers of the actors.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from refused import refused
from tiny_runs import config_of

from postgrad.cluster import actor_pool
from postgrad.cluster.engine_pool import EnginePool
from postgrad.cluster.engines import engine_config
from postgrad.cluster.ports import ENGINE, POLICY
from postgrad.cluster.verifier_pool import RayVerifierPool
from postgrad.cluster.wire import encode
from postgrad.cluster.worker_group import WorkerGroup
from postgrad.errors import RunError

OK = encode(["ok", None])


class FakeActor:
    """An actor; its calls are answered once all actors of the cluster have a node."""

    def __init__(self, ray: "FakeRay") -> None:
        self.ray = ray
        self.is_placed = len(ray.actors) < ray.num_free
        self._actor_id = len(ray.actors).to_bytes(4, "big")

    def __getattr__(self, method: str) -> Any:
        answer = ("10.0.0.1", 5) if method == "rendezvous_address" else OK
        return SimpleNamespace(remote=lambda *arguments: (self, method, answer))


class FakeRay:
    """A cluster of 2 CPU cores, `num_free` of which are free; `on_wait` changes it later.

    No call is answered before wait number `busy_until`.
    """

    exceptions = SimpleNamespace(RayActorError=ConnectionError, RayError=OSError)

    def __init__(self, num_free: int) -> None:
        self.num_cores = 2.0
        self.num_free = num_free
        self.num_waits = 0
        self.busy_until = 0
        self.on_wait: Any = lambda num_waits: None
        self.actors: dict[str, FakeActor] = {}
        self.killed: list[FakeActor] = []
        self._private = SimpleNamespace(state=SimpleNamespace(actors=self.actor_table))

    def put(self, value: Any) -> Any:
        return value

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.num_cores}

    def remote(self, actor_class: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self.add))

    def add(self, *arguments: Any) -> FakeActor:
        actor = FakeActor(self)
        self.actors[actor._actor_id.hex()] = actor
        return actor

    def actor_table(self, actor_id: str) -> dict[str, Any]:
        address = "10.0.0.1" if self.actors[actor_id].is_placed else ""
        return {"State": "PENDING_CREATION", "Address": {"IPAddress": address}}

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> Any:
        """Lets no time pass: the tests count waits."""
        self.num_waits += 1
        self.on_wait(self.num_waits)
        assert self.num_waits < 1000, "nothing ended the wait"
        if self.num_waits < self.busy_until:
            return [], references
        all_placed = all(actor.is_placed for actor in self.actors.values())
        for actor, method, answer in references:
            if all_placed or (actor.is_placed and method == "rendezvous_address"):
                return [(actor, method, answer)], []
        return [], references

    def get(self, reference: Any) -> Any:
        return reference[2]

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)


@pytest.fixture
def config(tiny):
    config = config_of("grpo", tiny, "cluster=ray", "cluster.workers=2", "model.threads=1")
    config.model.device = "cpu"
    return config


def lose_a_node(ray: FakeRay, at_wait: int) -> None:
    def change(num_waits: int) -> None:
        if num_waits == at_wait:
            ray.num_cores = 1.0

    ray.on_wait = change


def test_node_that_ray_counts_after_its_death_is_a_missing_core(config):
    """Rank 0 has started and waits for rank 1, whose actor has no node."""
    ray = FakeRay(num_free=1)
    lose_a_node(ray, at_wait=3)
    with refused("too_large", "cluster.workers", shows=r"need 2 CPU cores, the Ray cluster has 1"):
        WorkerGroup(ray, config, POLICY, 2, [POLICY])
    assert ray.num_waits == 3
    assert set(ray.killed) == set(ray.actors.values())


def test_worker_without_a_free_node_is_named(config, monkeypatch):
    monkeypatch.setattr(actor_pool, "PLACE_S", 0.0)
    ray = FakeRay(num_free=1)
    with pytest.raises(RunError, match=r"policy 1 worker .* 1 CPU free within 0 s"):
        WorkerGroup(ray, config, POLICY, 2, [POLICY])
    assert set(ray.killed) == set(ray.actors.values())


def test_worker_that_gets_a_node_later_starts(config):
    ray = FakeRay(num_free=1)

    def free(num_waits: int) -> None:
        if num_waits == 5:
            for actor in ray.actors.values():
                actor.is_placed = True

    ray.on_wait = free
    assert len(WorkerGroup(ray, config, POLICY, 2, [POLICY]).workers) == 2
    assert ray.num_waits >= 5


def test_nodes_that_leave_while_all_workers_have_one_do_not_matter(config, monkeypatch):
    """Workers that load for longer than PLACE_S have their nodes already."""
    monkeypatch.setattr(actor_pool, "PLACE_S", 0.0)
    ray = FakeRay(num_free=2)
    ray.busy_until = 5
    lose_a_node(ray, at_wait=1)
    assert len(WorkerGroup(ray, config, POLICY, 2, [POLICY]).workers) == 2


def test_lost_engine_is_not_restarted_on_too_few_nodes(config, capsys):
    ray = FakeRay(num_free=2)
    config.cluster.engines = 2
    pool = EnginePool(ray, engine_config(config), ENGINE, 2, [ENGINE])
    ray.num_cores = 1.0
    lost = actor_pool.WorkerLost(pool.engines[1], "died during engine.generate", died=True)
    with pytest.raises(RunError, match=r"engine 1 worker died .* need 2 CPU cores.* has 1"):
        pool._restart(pool.engines[1], lost)


def test_lost_verifier_actor_is_not_restarted_on_too_few_nodes(config, capsys):
    ray = FakeRay(num_free=2)
    config.cluster.workers = 1
    config.cluster.pools["verifier"] = 1
    config.reward.workers = 1
    pool = RayVerifierPool(ray, config)
    ray.num_cores, ray.num_free = 1.0, 0
    lost = actor_pool.WorkerLost(pool.workers[0], "died during verify", died=True)
    with pytest.raises(RunError, match=r"verifier worker died .* need 2 CPU cores.* has 1"):
        pool._restart(pool.workers[0], lost)
