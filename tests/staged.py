"""The process group backend "staged": gloo on copies of the tensors in host memory.

Ranks that share one GPU cannot use NCCL, and gloo reads device pointers as host pointers in some of
its collectives. Importing this module registers the backend, for tensors on any device. Every
collective is finished when it returns.
"""

from typing import Any

import torch
import torch.distributed as dist

ReduceOp: Any = dist.ReduceOp
BYTE = torch.uint8


def _finished() -> Any:
    """Return the work of a collective that is done."""
    future: Any = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat copy in host memory, which gloo may overwrite."""
    return tensor.detach().reshape(-1).to("cpu", copy=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat copy in host memory as bytes, as gloo knows few dtypes."""
    return _staged(tensor).view(BYTE)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for the tensor's bytes."""
    return torch.empty(_size(tensor), dtype=BYTE)


def _fill(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy flat data of the host, bytes or of the tensor's dtype, to the tensor."""
    if data.dtype == BYTE and tensor.dtype != BYTE:
        data = data.clone().view(tensor.dtype)  # a slice of bytes may not be aligned
    with torch.no_grad():
        tensor.detach().copy_(data.view(tensor.shape))


class StagedGroup(dist.ProcessGroup):
    """A group whose collectives run on gloo, in host memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._ranks = size
        self._own = rank
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "staged"

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the flat reduction over the ranks, in host memory and the tensor's dtype."""
        kind, factor = op.__getstate__() if type(op) is ReduceOp else (op, None)
        data = _staged(tensor)
        if data.dtype == torch.bool:
            data = data.to(BYTE)
        if kind == ReduceOp.PREMUL_SUM:
            data = data * (factor.cpu() if isinstance(factor, torch.Tensor) else factor)
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp.SUM if kind in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else kind
        if data.numel():
            self._gloo.allreduce([data], options).wait()
        if kind == ReduceOp.AVG:
            data = data / self._ranks if data.is_floating_point() else data // self._ranks
        return data.to(tensor.dtype)

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of every rank's tensor, all of one size."""
        parts = [_empty(tensor) for _ in range(self._ranks)]
        if _size(tensor):
            self._gloo.allgather([parts], [_bytes(tensor)]).wait()
        return parts

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            data = self._reduced(tensor, op)
            with torch.no_grad():
                tensor.detach().copy_(data.view(tensor.shape))
        return _finished()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Any:
        for tensor in tensors:
            data = self._reduced(tensor, opts.reduceOp)
            if self._own == opts.rootRank:
                with torch.no_grad():
                    tensor.detach().copy_(data.view(tensor.shape))
        return _finished()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, data in zip(parts, self._gathered(tensor), strict=True):
                _fill(part, data)
        return _finished()

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        _fill(output, torch.cat(self._gathered(tensor)))
        return _finished()

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _finished()

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather(outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            start = sum(part.numel() for part in parts[: self._own])
            self._scatter_reduced(output, whole, start, opts)
        return _finished()

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        self._scatter_reduced(output, tensor, self._own * output.numel(), opts)
        return _finished()

    def _scatter_reduced(self, output: Any, whole: Any, start: int, opts: Any) -> None:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        data = self._reduced(whole, op)[start : start + output.numel()]
        with torch.no_grad():
            output.detach().copy_(data.view(output.shape))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _finished()

    def _exchanged(self, output: Any, data: Any, received: list[int], sent: list[int]) -> None:
        name = "all_to_all_single" if hasattr(self._gloo, "all_to_all_single") else "alltoall_base"
        options = dist.AllToAllOptions()
        getattr(self._gloo, name)(output, data, received, sent, options).wait()

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        received, sent = ([_size(part) for part in parts] for parts in (outputs, inputs))
        data = torch.empty(sum(received), dtype=BYTE)
        self._exchanged(data, torch.cat([_bytes(part) for part in inputs]), received, sent)
        for part, piece in zip(outputs, data.split(received), strict=True):
            _fill(part, piece)
        return _finished()

    def alltoall_base(
        self, output: Any, tensor: Any, received: Any, sent: Any, opts: Any = None
    ) -> Any:
        data = _empty(output)
        sizes = [self._split(output, received), self._split(tensor, sent)]
        self._exchanged(data, _bytes(tensor), *sizes)
        _fill(output, data)
        return _finished()

    def _split(self, tensor: torch.Tensor, rows: Any) -> list[int]:
        """Return the bytes that go to or come from each rank: of its rows, or equal shares."""
        if not rows:
            return [_size(tensor) // self._ranks] * self._ranks
        row = _size(tensor) // tensor.shape[0] if tensor.shape[0] else 0
        return [count * row for count in rows]

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        for tensor in tensors:
            data = _bytes(tensor)
            options = dist.BroadcastOptions()
            options.rootRank = opts.rootRank
            if data.numel():
                self._gloo.broadcast([data], options).wait()
            if self._own != opts.rootRank:
                _fill(tensor, data)
        return _finished()

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        data = [_empty(tensor) for tensor in outputs]
        self._gloo.scatter(data, [list(map(_bytes, parts)) for parts in inputs], opts).wait()
        for output, piece in zip(outputs, data, strict=True):
            _fill(output, piece)
        return _finished()

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        data = [list(map(_empty, parts)) for parts in outputs]
        self._gloo.gather(data, list(map(_bytes, inputs)), opts).wait()
        for parts, pieces in zip(outputs, data, strict=True):
            for part, piece in zip(parts, pieces, strict=True):
                _fill(part, piece)
        return _finished()

    def barrier(self, opts: Any = None) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._gloo.barrier().wait()
        return _finished()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        for tensor in tensors:
            self._gloo.send([_bytes(tensor)], rank, tag).wait()
        return _finished()

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        for tensor in tensors:
            data = _empty(tensor)
            self._gloo.recv([data], rank, tag).wait()
            _fill(tensor, data)
        return _finished()

    # Torch 2.13's names of the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


dist.Backend.register_backend("staged", StagedGroup, devices=["cpu", "cuda"])
