"""Devices, types, threads and memory: the one place that knows what hardware there is.

Everything is probed, not assumed, and the answers are written into the run's configuration so that a resumed run computes the same bits.
"""

import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from postgrad.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """The device of `model.device`; auto takes an accelerator where there is one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available[name]:
        raise ConfigError(f"model.device={name} is not there on this machine; use model.device=auto")
    return torch.device(name)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def choose_dtype(name: str, device: torch.device) -> str:
    """The compute type of `model.dtype`; auto takes bfloat16 where this device multiplies it clearly faster than float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    if device.type == "mps":
        return "float32"
    seconds = {dtype: _matmul_seconds(dtype) for dtype in DTYPES}
    return "bfloat16" if seconds["bfloat16"] * 1.5 < seconds["float32"] else "float32"


def matmul_flops(dtype: str) -> float:
    """Measured floating-point operations a second of a middling matrix product on the CPU."""
    return 2 * 512**3 / _matmul_seconds(dtype)


def _matmul_seconds(dtype: str) -> float:
    a = torch.ones(512, 512, dtype=DTYPES[dtype])
    return _best_seconds(lambda: a @ a, repeats=5)


def _best_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def probe_threads(hidden_size: int, dtype: str) -> int:
    """The thread count that runs a small stack of this width fastest; more threads must win clearly to be taken.

    Small models are often faster on one thread than on all of them, on a busy machine by far.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    candidates = sorted({1, 2, 4, 8, cores} & set(range(1, cores + 1)))
    before = torch.get_num_threads()
    layer = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size)).to(
        DTYPES[dtype]
    )
    x = torch.zeros(512, hidden_size, dtype=DTYPES[dtype])

    def work() -> Tensor:
        y = x
        for _ in range(4):
            y = layer(y)
        return y

    best, best_seconds = 1, float("inf")
    try:
        for threads in candidates:
            torch.set_num_threads(threads)
            with torch.no_grad():
                seconds = _best_seconds(work, repeats=8)
            if seconds < 0.85 * best_seconds:
                best, best_seconds = threads, seconds
    finally:
        torch.set_num_threads(before)
    return best


def set_threads(threads: int) -> None:
    """Fix the CPU threads, and let idle ones sleep: spinning threads stall a busy machine."""
    torch.set_num_threads(threads)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process held so far: on the accelerator where there is one, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes(device: torch.device) -> int:
    """Memory that could still be had on an accelerator: what is free, and what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
