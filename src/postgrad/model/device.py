"""Devices, types, threads and memory: the one place that knows what hardware there is, and the only one that names a kind of it.

Everything is probed, not assumed, and the answers are written into the run's configuration so that a resumed run computes the same bits.
What torch says in one way for all accelerators is asked in that way; what only some of them have is a question here: `supports_triton`,
`supports_graph_capture`, `supports_state_streaming`, `has_float32_accumulation`.
"""

import ctypes
import importlib.util
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from postgrad.errors import ConfigError, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What model.device may say. ROCm's devices call themselves cuda; npu (Ascend) is known to torch once torch_npu is installed.
KINDS = ("auto", "cpu", "cuda", "mps", "npu", "xpu")
HINTS = {"npu": "; Ascend devices need pip install torch_npu"}


def choose_device(name: str) -> torch.device:
    """The device of `model.device`; auto takes an accelerator where there is one."""
    if name not in KINDS:
        meant = (
            "use model.device=auto, which takes the GPU that is there"
            if name == "gpu"
            else did_you_mean(name, KINDS)
        )
        raise ConfigError(f"model.device={name} is not a kind of device; {meant}")
    found = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if found is None else found.type
    if name not in ("auto", "cpu", there):
        raise ConfigError(
            f"model.device={name} is not there on this machine; use model.device=auto{HINTS.get(name, '')}"
        )
    return torch.device(there if name == "auto" else name)


def is_gpu(name: str) -> bool:
    """Whether a kind of device is one that schedulers hand out as a GPU: NVIDIA's, AMD's, Intel's."""
    return name in ("cuda", "xpu")


def accelerators() -> list[torch.device]:
    """Every accelerator torch can use on this machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return (
        []
        if found is None
        else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
    )


@cache
def supports_triton(device: torch.device) -> bool:
    """Whether our Triton kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def supports_graph_capture(device: torch.device) -> bool:
    """Whether a sequence of kernels can be recorded there and played again at once."""
    return device.type == "cuda"


def capture_graph(work: Callable[[], object], pool: Any) -> Any:
    """Record what `work` launches. `pool` is an earlier graph's memory, or None."""
    return capture_graphs([work], pool)[0]


def capture_graphs(works: Sequence[Callable[[], object]], pool: Any) -> list[Any]:
    """Record what each of them launches, after one run of all that compiles and allocates; later ones may use what earlier ones made.

    What recordings hold is no longer allocated in torch's eyes, but it is taken: peak_memory_bytes adds it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.empty_cache()  # a recording takes memory of its own, and cannot ask for what lies idle
    _Recorded.peak = peak_memory_bytes(torch.device("cuda"))
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    graphs: list[Any] = []
    for work in works:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool or (graphs[0].pool() if graphs else None)):
            work()
        graphs.append(graph)
    _Recorded.held[graphs[0]] = max(
        0, torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before
    )
    torch.cuda.reset_peak_memory_stats()
    return graphs


class _Recorded:
    """Bytes that living recordings hold, and the most there was before the last of them."""

    held: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
    peak = 0


def supports_state_streaming(device: torch.device) -> bool:
    """Whether an optimizer's state may lie in page-locked host memory and travel there and back beside the update."""
    return device.type == "cuda"


def device_module(device: torch.device) -> Any:
    """The device's own module of torch: Stream, Event, stream, current_stream, device."""
    return torch.get_device_module(device)


def lock_pages(pointer: int, size: int) -> int:
    """Page-lock host memory for copies to the device; 0, or the driver's error code."""
    cudart: Any = torch.cuda.cudart()
    return int(cudart.cudaHostRegister(pointer, size, 0))


def unlock_pages() -> Callable[[int], object]:
    """The function that undoes lock_pages; asked for early, because modules are gone when a process winds down."""
    cudart: Any = torch.cuda.cudart()
    return cudart.cudaHostUnregister


def copy_async(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for: it takes its turn behind the work that was given to the device before."""
    if values.device.type != "cpu" or device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def has_float32_accumulation(device: torch.device) -> bool:
    """Whether bfloat16 matrices multiply into a float32 result there."""
    return device.type == "cuda"


def has_own_memory(device: torch.device) -> bool:
    """Whether the device is an accelerator with memory of its own, which needs many tokens at once to be busy."""
    return device.type in ("cuda", "npu", "xpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def choose_dtype(name: str, device: torch.device) -> str:
    """The compute type of `model.dtype`; auto takes bfloat16 where this device multiplies it clearly faster than float32."""
    if name != "auto":
        return name
    if device.type != "cpu":
        supported = getattr(
            torch.get_device_module(device), "is_bf16_supported", None
        )  # there is no such question on mps
        return "bfloat16" if supported is not None and supported() else "float32"
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
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    candidates = sorted({1, 2, 4, 8, cores} & set(range(1, cores + 1)))
    before = torch.get_num_threads()
    layer = nn.Sequential(
        nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size)
    ).to(DTYPES[dtype])
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
    """Fix the CPU threads, and let the process keep the memory it frees."""
    torch.set_num_threads(threads)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Ask glibc not to give large blocks back to the system: getting them again, page by page, costs as much as filling them."""
    if sys.platform != "linux":
        return
    trim_threshold, mmap_max, never = -1, -4, 2**31 - 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, never)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process held so far: on the accelerator where there is one, else resident memory."""
    if has_own_memory(device):
        since = torch.get_device_module(device).max_memory_allocated(device) + sum(
            _Recorded.held.values()
        )
        return max(since, _Recorded.peak)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes(device: torch.device) -> int:
    """Memory that could still be had on an accelerator: what is free, and what torch holds without using it."""
    module = torch.get_device_module(device)
    return memory_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and whole memory of an accelerator that has its own."""
    return torch.get_device_module(device).mem_get_info(device)


def total_memory_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if has_own_memory(device):
        return torch.get_device_module(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_device(device: torch.device) -> str:
    """The device's name, as its maker calls it where torch knows."""
    if device.type == "mps":
        return "Apple GPU"
    if not has_own_memory(device):
        return device.type
    name = str(torch.get_device_module(device).get_device_name(device))
    return f"{name}, ROCm {torch.version.hip}" if torch.version.hip else name


def unusable_gpu_hint() -> str:
    """What to do about an NVIDIA GPU that torch cannot use; empty when there is none."""
    if torch.cuda.is_available() or not Path("/dev/nvidia0").exists():
        return ""
    return f"an NVIDIA GPU is here but torch {torch.__version__} cannot use it: install a CUDA build of torch"
