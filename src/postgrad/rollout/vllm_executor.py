"""vLLM's worker in a process that is a rank of a process group already.

The ranks of a divided engine run the same scheduler on the same requests, each with its slices of
the weights. They exchange hidden states and logits, so all of them sample the same tokens. vLLM
calls this an external launcher. Importing this file imports vLLM.
"""

import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]
from vllm.v1.executor.uniproc_executor import (  # type: ignore[import-not-found]
    ExecutorWithExternalLauncher,
)

from postgrad.model.device import choose_device


class RankExecutor(ExecutorWithExternalLauncher):
    """One rank of the default process group; neighboring ranks divide an engine among them."""

    number = 0  # the same on all ranks of the process group, and on no others

    def _init_executor(self) -> None:
        super()._init_executor()
        _unlink_shared_memory(self.number)

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return a name of the process group, this process's rank and the index of its device.

        vLLM's CPU build names its shared memory after the number at the end, so engines on one
        machine need different ones. Ray shows each actor one device, so its index is 0.
        """
        device = choose_device(self.vllm_config.device_config.device_type)
        self.number = min_over_ranks(secrets.randbits(62), device)
        return f"tcp://ranks:{self.number}", dist.get_rank(), 0


def _unlink_shared_memory(number: int) -> None:
    """Remove the names of the shared memory that the ranks of an engine have opened.

    The memory is freed when the last rank ends. With its names it would stay when ranks are
    killed, and Ray ends its actors so.
    """
    for path in Path("/dev/shm").glob(f"{number}-*"):
        path.unlink(missing_ok=True)  # another rank may be first
    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # so that vLLM does not unlink it a second time


def min_over_ranks(value: int, device: torch.device) -> int:
    """Return the smallest value of all ranks of the default process group. A collective."""
    smallest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)
