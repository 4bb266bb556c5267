"""The number of CPU threads: the one that computes fastest, and setting it."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from postgrad.machine import available_cores
from postgrad.model.device import DTYPES, best_seconds


def probe_threads(hidden_size: int, dtype: str) -> int:
    """Return the thread count that runs a small MLP of this width fastest.

    Small models are often faster on one thread than on all, especially on a busy machine. So more
    threads are chosen only if they are clearly faster.
    """
    cores = min(available_cores(), _allowed_threads())
    candidates = sorted({1, 2, 4, 8, cores} & set(range(1, cores + 1)))
    mlp = nn.Sequential(
        nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size)
    ).to(DTYPES[dtype])
    x = torch.zeros(512, hidden_size, dtype=DTYPES[dtype])

    def work() -> Tensor:
        y = x
        for _ in range(4):
            y = mlp(y)
        return y

    best = 1
    least = float("inf")
    with kept_threads(), torch.no_grad():
        for threads in candidates:
            torch.set_num_threads(threads)
            seconds = best_seconds(work, repeats=8)
            if seconds < 0.85 * least:
                best = threads
                least = seconds
    return best


def _allowed_threads() -> int:
    """Return the most threads that OMP_NUM_THREADS allows."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) else sys.maxsize


def set_threads(threads: int) -> None:
    """Set the number of CPU threads, and let the process keep the memory it frees."""
    torch.set_num_threads(threads)
    _keep_freed_memory()


@contextmanager
def kept_threads() -> Iterator[None]:
    """Set the caller's number of CPU threads again after the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _keep_freed_memory() -> None:
    """Tell glibc not to return large blocks to the system.

    Getting them again, page by page, costs as much as filling them.
    """
    if sys.platform != "linux":
        return
    trim_threshold = -1
    mmap_max = -4
    never = 2**31 - 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, never)
