"""The worker's side on Ray: an actor that builds its models from the configuration, alone or as one rank of several, and answers calls.

What arrives and what leaves are blocks of bytes of wire.py; Ray moves them through its object store and never looks inside.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from postgrad.cluster.worker import Ports, answer, attempt

POLICY, ENGINE = "policy", "engine"


class Rank:
    """One actor. It is made empty, so that a failing start is words and not a dead actor."""

    def __init__(self) -> None:
        self.ports: Ports = {}
        self.first = True
        self.listener: socket.socket | None = None

    def meeting_point(self) -> tuple[str, int]:
        """Where the other ranks find this one: an address of this machine, never all of them."""
        import ray

        host = ray.util.get_node_ip_address()
        self.listener = socket.create_server((host, 0))
        return host, self.listener.getsockname()[1]

    def start(
        self, config: str, hosts: list[str], rank: int, size: int, point: tuple[str, int] | None
    ) -> bytes:
        """Build the models that `hosts` names. Without a `point` this actor stands alone and only speaks."""
        from postgrad.cluster.wire import encode

        self.first = rank == 0
        kind, found = attempt(lambda: self._build(config, hosts, rank, size, point))
        if kind == "ok":
            self.ports = found
        return encode([kind, None if kind == "ok" else found])

    def call(self, request: bytes, *parts: bytes) -> tuple[bytes, bytes]:
        """(how it went, the result). `parts` are further arguments that came by reference. Only the first rank's result travels,
        and everybody's part of what was generated."""
        from postgrad.cluster.wire import decode, encode

        port, method, arguments = decode(request)
        kind, value = answer(self.ports, port, method, [*arguments, *map(decode, parts)])
        if kind != "ok":
            return encode([kind, value]), b""
        return encode([kind, None]), encode(
            value
        ) if self.first or method == "generate" else encode(None)

    def _build(
        self, text: str, hosts: list[str], rank: int, size: int, point: tuple[str, int] | None
    ) -> Ports:
        from postgrad.cluster.engines import load_engine, read_engine_config
        from postgrad.config.compose import from_yaml
        from postgrad.methods import find_method
        from postgrad.model.device import set_threads

        if hosts == [ENGINE]:
            return {ENGINE: ("engine", load_engine(read_engine_config(text)).engine)}
        config = from_yaml(text, lambda name: find_method(name).Settings)
        set_threads(config.model.threads)
        if point is None:
            return _speakers(config, hosts)
        ranks = self._meet(config, rank, size, point)
        return _trained(config, hosts, ranks)

    def _meet(self, config: Any, rank: int, size: int, point: tuple[str, int]) -> Any:
        import torch.distributed as dist

        from postgrad.model.device import choose_device
        from postgrad.model.ranks import Ranks

        device, limit = choose_device(config.model.device), timedelta(seconds=config.cluster.wait_s)
        host, port = point
        if host.startswith("127."):  # sockets of a cluster on one machine stay on it
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        descriptor = self.listener.detach() if self.listener is not None else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, rank == 0, limit, wait_for_workers=False, master_listen_fd=descriptor
        )
        backend = dist.get_default_backend_for_device(device)  # type: ignore[attr-defined]  # nccl, gloo, or what its maker has
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        return Ranks.from_process_group(device, config.cluster.offload)


class SyncedEngine:
    """A rank's engine beside the sharded policy: over a whole copy of the weights, gathered anew when they have moved."""

    def __init__(self, engine: Any, model: Any, policy: Any) -> None:
        self.engine, self.model, self.policy = engine, model, policy
        self.token_stats = policy.weights_version

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        if self.token_stats != self.policy.weights_version:
            self.policy.copy_weights_to(self.model)
            self.token_stats = self.policy.weights_version
        return self.engine.generate(requests, sampling)

    def publish(self, weights: dict[str, Any]) -> None:
        """Nothing to do: it follows by itself."""


def _speakers(config: Any, hosts: list[str]) -> Ports:
    """Roles that generate text, each over a full copy of its model."""
    from postgrad.cluster.host import build_role
    from postgrad.methods import find_method

    method = find_method(config.method.name)(config)
    roles = method.all_roles()
    return {
        name: (roles[name].kind, build_role(config, method, name, roles[name])) for name in hosts
    }


def _trained(config: Any, hosts: list[str], ranks: Any) -> Ports:
    """Models divided over the ranks; those that continue text are whole on each."""
    from postgrad.cluster.engines import engine_config, load_engine
    from postgrad.cluster.host import (
        SPEAKING,
        build_role,
        is_base,
        load_policy,
        load_role,
    )
    from postgrad.methods import find_method
    from postgrad.model.sharded import ShardedBaseModel, ShardedCritic, ShardedFrozen, ShardedPolicy

    method = find_method(config.method.name)(config)
    roles = method.all_roles()
    ports: Ports = {}
    if POLICY in hosts:
        loaded = load_policy(config, method, device="cpu")  # a device then gets its shards only
        policy = ShardedPolicy(config, loaded, method, ranks)
        ports[POLICY] = ("policy", policy)
        if ENGINE in hosts:
            engine, engine_model = load_engine(engine_config(config))
            if engine_model is not None:
                engine = SyncedEngine(engine, engine_model.model, policy)
            ports[ENGINE] = ("engine", engine)
    for name in hosts:
        if name in (POLICY, ENGINE):
            continue
        role: Any = roles[name]
        if role.kind in SPEAKING:
            ports[name] = (role.kind, build_role(config, method, name, role))
            continue
        if POLICY in hosts and is_base(config, role):
            ports[name] = (role.kind, ShardedBaseModel(ports[POLICY][1]))
            continue
        loaded = load_role(config, name, role.path or config.model.path, device="cpu")
        critic = role.kind == "critic"
        model = (
            ShardedCritic(config, loaded, method, role.lr, ranks)  # type: ignore[arg-type]
            if critic
            else ShardedFrozen(config, loaded, ranks)
        )  # type: ignore[arg-type]
        ports[name] = (role.kind, model)
    return ports
