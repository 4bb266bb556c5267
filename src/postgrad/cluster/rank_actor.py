"""The actor on Ray that holds models: one rank of a sharded group, or an engine alone.

Requests and results are bytes of wire.py; Ray moves them through its object store.
"""

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

from postgrad.cluster.ports import Ports, attempt, call_port

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
        """Open a port on this node's address, for the process group; returns host and port."""
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
        """Build the models of `port_names` from the YAML `config`; returns [status, message].

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

    def call(
        self, request: bytes, weights: list[Any] | None, min_bytes: float, *parts: bytes
    ) -> tuple[bytes, bytes, list[Any]]:
        """Call a port; returns the encoded [status, message], the encoded result, and references.

        Results are equal on all ranks, so only the first rank returns one. Generated text differs,
        so all return it. Of `weights` each rank puts its share into Ray's object store and returns
        the parts (stored.py).

        Args:
            request: the encoded port, method and arguments (stored.py).
            weights: the parts of a further argument, a WeightsRef.
            min_bytes: tensors of the result with as many bytes stay in the object store; the
                references are theirs.
            parts: the large tensors of the request.
        """
        import ray

        from postgrad.cluster.stored import WeightsRef, decode_call, encode_result, store_weights
        from postgrad.cluster.wire import encode

        port, method, arguments = decode_call(request, parts)
        if weights is not None:
            arguments = [*arguments, WeightsRef(ray, weights)]
        if method == "weights":
            _, model = self.ports[port]
            status, result = attempt(lambda: store_weights(ray, model.ranks.own_weights()))
        else:
            status, result = call_port(self.ports, port, method, arguments)
        if status != "ok":
            return encode([status, result]), b"", []
        if method == "weights":
            return encode(["ok", None]), b"", result
        if not self.is_first and method != "generate":
            result = None
        return encode(["ok", None]), *encode_result(result, min_bytes)

    def _build(
        self,
        text: str,
        port_names: list[str],
        rank: int,
        size: int,
        address: tuple[str, int] | None,
    ) -> Ports:
        from postgrad.cluster.host import build_ports, read_config
        from postgrad.cluster.meshes import worker_mesh
        from postgrad.config.schema import Config
        from postgrad.methods import find_method
        from postgrad.model.parallel.ranks import Ranks

        config = read_config(text, port_names)
        ranks: Ranks | None = None
        if address is not None:
            device = self._init_process_group(config, rank, size, address)
            if isinstance(config, Config):
                roles = find_method(config.method.name)(config).all_roles()
                mesh = worker_mesh(config, roles, port_names, size)
                ranks = Ranks.from_process_group(device, mesh)
        return build_ports(config, port_names, ranks)

    def _init_process_group(
        self, config: Any, rank: int, size: int, address: tuple[str, int]
    ) -> Any:
        """Join the process group of the ranks; returns this rank's device."""
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
    """Choose the network interface of the process group; `host` is the first rank's address.

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
    """Return the network interface that has this IPv4 address; "" if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
