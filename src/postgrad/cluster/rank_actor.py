"""The actor on Ray that holds models: one rank of a sharded group, or an engine alone.

Requests and results are bytes of wire.py; Ray moves them through its object store.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from postgrad.cluster.ports import ENGINE, POLICY, Ports, attempt, call_port

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class RankActor:
    """An actor that answers calls to its ports.

    It is created without models, so that a failed start returns an error instead of a dead
    actor.
    """

    def __init__(self) -> None:
        self.ports: Ports = {}
        self.is_first = True
        self.listener: socket.socket | None = None

    def rendezvous_address(self) -> tuple[str, int]:
        """Opens a port on this node's address, for the process group; returns host and port."""
        import ray

        host = ray.util.get_node_ip_address()
        self.listener = socket.create_server((host, 0))
        return host, self.listener.getsockname()[1]

    def start(
        self,
        config: str,
        port_names: list[str],
        rank: int,
        size: int,
        address: tuple[str, int] | None,
    ) -> bytes:
        """Builds the models of `port_names` from the YAML `config`; returns [status, message].

        `address` is the rendezvous of the `size` ranks: of sharded models, or of one engine whose
        weights are divided over them. Without it, the actor joins no process group and holds only
        models that generate text.
        """
        from postgrad.cluster.wire import encode

        self.is_first = rank == 0
        status, result = attempt(lambda: self._build(config, port_names, rank, size, address))
        if status != "ok":
            return encode([status, result])
        self.ports = result
        return encode(["ok", None])

    def call(self, request: bytes, weights: list[Any] | None = None) -> tuple[bytes, bytes]:
        """Returns the encoded [status, message] and the encoded result.

        `weights` are the parts of a further argument, a WeightsRef. Results are equal on all
        ranks, so only the first rank returns one. Generated text differs, so all return it.
        """
        import ray

        from postgrad.cluster.weights_ref import WeightsRef
        from postgrad.cluster.wire import decode, encode

        port, method, arguments = decode(request)
        if weights is not None:
            arguments = [*arguments, WeightsRef(ray, weights)]
        status, result = call_port(self.ports, port, method, arguments)
        if status != "ok":
            return encode([status, result]), b""
        if not self.is_first and method != "generate":
            result = None
        return encode(["ok", None]), encode(result)

    def call_by_reference(
        self, request: bytes, min_bytes: int, *parts: bytes
    ) -> tuple[bytes, bytes, list[Any]]:
        """Returns the encoded [status, message], the encoded result, and references of its parts.

        `parts` are the large tensors of the request. Tensors of the result that have `min_bytes`
        or more stay in Ray's object store (stored.py). Only the first rank returns a result.
        """
        from postgrad.cluster.stored import decode_call, encode_result
        from postgrad.cluster.wire import encode

        status, result = call_port(self.ports, *decode_call(request, parts))
        if status != "ok":
            return encode([status, result]), b"", []
        return encode(["ok", None]), *encode_result(result if self.is_first else None, min_bytes)

    def store_weights(self, port: str) -> tuple[bytes, list[Any]]:
        """Puts this rank's share of a model's weights into Ray's object store.

        Returns the encoded [status, message] and the parts (weights_ref.py).
        """
        import ray

        from postgrad.cluster.weights_ref import store_weights
        from postgrad.cluster.wire import encode

        _, model = self.ports[port]
        status, result = attempt(lambda: store_weights(ray, model.ranks.own_weights()))
        if status != "ok":
            return encode([status, result]), []
        return encode(["ok", None]), result

    def _build(
        self,
        text: str,
        port_names: list[str],
        rank: int,
        size: int,
        address: tuple[str, int] | None,
    ) -> Ports:
        from postgrad.cluster.engines import load_engine, read_engine_config
        from postgrad.cluster.meshes import worker_mesh
        from postgrad.config.compose import from_yaml
        from postgrad.methods import find_method
        from postgrad.model.parallel.ranks import Ranks
        from postgrad.model.threads import set_threads

        if port_names == [ENGINE]:
            settings = read_engine_config(text)
            if address is not None:
                self._init_process_group(settings, rank, size, address)
            return {ENGINE: ("engine", load_engine(settings).engine)}
        config = from_yaml(text, lambda name: find_method(name).Settings)
        config.method.freeze()
        set_threads(config.model.threads)
        if address is None:
            return _build_models(config, port_names, None)
        device = self._init_process_group(config, rank, size, address)
        method = find_method(config.method.name)(config)
        cluster = worker_mesh(config, method.all_roles(), port_names, size)
        return _build_models(config, port_names, Ranks.from_process_group(device, cluster))

    def _init_process_group(
        self, config: Any, rank: int, size: int, address: tuple[str, int]
    ) -> Any:
        """Joins the process group of the ranks; returns this rank's device."""
        import torch.distributed as dist

        from postgrad.model.device import choose_device

        device = choose_device(config.model.device)
        timeout = timedelta(seconds=config.cluster.wait_s)
        host, port = address
        _choose_interface(host)
        descriptor = self.listener.detach() if self.listener is not None else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            size,
            rank == 0,
            timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        backend = dist.get_default_backend_for_device(device)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return device


def _choose_interface(host: str) -> None:
    """Chooses the network interface of the process group; `host` is the first rank's address.

    Left alone, gloo takes the address of this machine's host name. That is often a loopback
    address, which ranks on other nodes cannot reach. NCCL finds an interface itself.
    """
    import ray

    if host.startswith("127."):  # a cluster on one machine uses the loopback interface only
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        return
    interface = interface_of(ray.util.get_node_ip_address())
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str:
    """Returns the network interface that has this IPv4 address; "" if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


class SyncedEngine:
    """A rank's engine on a full copy of the sharded policy, updated when the weights changed."""

    def __init__(self, engine: Any, model: Any, policy: Any) -> None:
        self.engine = engine
        self.model = model
        self.policy = policy
        self.weights_version = policy.weights_version

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        if self.weights_version != self.policy.weights_version:
            self.policy.ranks.copy_weights_to(self.model)
            self.weights_version = self.policy.weights_version
        return self.engine.generate(requests, sampling)

    def publish(self, weights: dict[str, Any]) -> None:
        """Does nothing: `generate` copies the policy's weights."""


def _build_models(config: Any, port_names: list[str], ranks: Any) -> Ports:
    """Returns the ports; models are sharded over the ranks, or None: they generate text.

    Models that generate text are not sharded: each rank has a full copy.
    """
    from postgrad.cluster.host import build_role, load_policy
    from postgrad.methods import find_method
    from postgrad.model.policy import LocalPolicy

    method = find_method(config.method.name)(config)
    roles = method.all_roles()
    ports: Ports = {}
    policy: LocalPolicy | None = None
    if POLICY in port_names:
        loaded = load_policy(config, method, method.objective, ranks)
        policy = LocalPolicy(config, loaded, method.objective, ranks)
        ports[POLICY] = ("policy", policy)
    for name in port_names:
        if name == ENGINE:
            ports[ENGINE] = ("engine", _build_synced_engine(config, policy))
        elif name != POLICY:
            model = build_role(config, method, name, roles[name], policy, ranks)
            ports[name] = (roles[name].kind, model)
    return ports


def _build_synced_engine(config: Any, policy: Any) -> Any:
    from postgrad.cluster.engines import engine_config, load_engine

    engine, loaded = load_engine(engine_config(config))
    if loaded is None:  # the engine keeps its own weights
        return engine
    return SyncedEngine(engine, loaded.model, policy)
