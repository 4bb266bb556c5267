"""Devices, compute types and memory. The only file that names kinds of hardware.

Properties are probed, and the results are written into the run's configuration, so a resumed run
computes the same bits. What torch offers for all accelerators is used in that form. For what
only some devices have, other files call a function of this one: `supports_triton`,
`supports_graph_capture`, `supports_state_streaming`, `has_float32_accumulation`.
"""

import importlib.util
import os
import re
import resource
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.errors import UnknownName, Unsupported, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Values of model.device. ROCm devices are named cuda; torch knows npu (Ascend) with torch_npu.
DEVICE_KINDS = ("auto", "cpu", "cuda", "mps", "npu", "xpu")
# The kind that Triton's kernels run on, and that a run can be planned for without having it.
KERNEL_DEVICE = "cuda"
# Operations per second of matrix products. Fewer mean that the CPU emulates the type.
EMULATED_FLOPS = 1e9
# How libraries say that memory is missing: torch for the host's, CUDA and Triton, cuBLAS.
NO_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
HINTS = {"npu": "; Ascend devices need pip install torch_npu"}


def choose_device(name: str) -> torch.device:
    """Return the device of `model.device`; auto is the accelerator if there is one.

    Raises: ConfigError for an unknown kind or a device that this machine does not have.
    """
    if name == "gpu":
        raise UnknownName("model.device=gpu is not a kind of device; use model.device=auto")
    if name not in DEVICE_KINDS:
        hint = did_you_mean(name, DEVICE_KINDS)
        raise UnknownName(f"model.device={name} is not a kind of device; {hint}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if accelerator is None else accelerator.type
    if name == "auto":
        return torch.device(available)
    if name not in ("cpu", available):
        raise Unsupported(
            f"model.device={name} is not available on this machine; "
            f"use model.device=auto{HINTS.get(name, '')}"
        )
    return torch.device(name)


def is_gpu(name: str) -> bool:
    """Return whether schedulers assign this kind of device as a GPU: NVIDIA, AMD, Intel."""
    return name in ("cuda", "xpu")


def accelerators() -> list[torch.device]:
    """Return every accelerator that torch can use on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


# ---- what only some devices have


@cache
def supports_triton(device: torch.device) -> bool:
    """Return whether our Triton kernels run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def supports_graph_capture(device: torch.device) -> bool:
    """Return whether a sequence of kernels can be captured as a graph and replayed."""
    return device.type == "cuda"


def supports_captured_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies the experts' matrices without waiting for the host.

    It has such a kernel for bfloat16 on NVIDIA's Hopper and Blackwell.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def supports_state_streaming(device: torch.device) -> bool:
    """Return whether optimizer state can stream from page-locked host memory during an update."""
    return device.type == "cuda"


def has_float32_accumulation(device: torch.device) -> bool:
    """Return whether bfloat16 matrices can be multiplied into a float32 result."""
    return device.type == "cuda" or is_simulated_gpu(device)


def is_simulated_gpu(device: torch.device) -> bool:
    """Return whether a pass on this device stands for one on a GPU; see sizing/simulate.py."""
    return device.type == "meta"


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device is an accelerator with its own memory.

    Such devices need many tokens per pass to be busy.
    """
    return device.type in ("cuda", "npu", "xpu")


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory that a program of a kernel may use; without a GPU, no limit."""
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", sys.maxsize)


# ---- graphs


def capture_graph(step: Callable[[], object], pool: Any) -> Any:
    """Return the graph of what `step` launches. `pool` is an earlier graph's memory, or None."""
    return capture_graphs([step], pool)[0]


def capture_graphs(steps: Sequence[Callable[[], object]], pool: Any) -> list[Any]:
    """Return one graph per step, after one warm-up run of all that compiles and allocates.

    Later steps may read what earlier steps computed. torch does not count the memory of graphs as
    allocated; peak_memory_bytes adds it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.empty_cache()  # a graph has its own memory and cannot use idle cached blocks
    _GraphMemory.peak = peak_memory_bytes(torch.device("cuda"))
    before = _unallocated_bytes()
    graphs: list[Any] = []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        graph_pool = pool
        if graph_pool is None and graphs:
            graph_pool = graphs[0].pool()
        with torch.cuda.graph(graph, pool=graph_pool):
            step()
        graphs.append(graph)
    _GraphMemory.held[graphs[0]] = max(0, _unallocated_bytes() - before)
    torch.cuda.reset_peak_memory_stats()
    return graphs


def _unallocated_bytes() -> int:
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


class _GraphMemory:
    """Memory that torch does not count: of live graphs, and what DetachableMemory has attached.

    `peak` is the largest memory up to the last change of either.
    """

    held: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
    attached = 0
    peak = 0


def track_outside_memory(device: torch.device, num_bytes: int) -> None:
    """Count memory that was allocated (or freed, if negative) without torch."""
    _GraphMemory.peak = peak_memory_bytes(device)
    _GraphMemory.attached += num_bytes
    torch.cuda.reset_peak_memory_stats(device)


def empty_device_cache(device: torch.device) -> None:
    """Make torch return the memory that it keeps for later allocations to the device."""
    torch.get_device_module(device).empty_cache()


# ---- copies and synchronization


def device_module(device: torch.device) -> Any:
    """Return torch's module for the device: Stream, Event, stream, current_stream, device."""
    return torch.get_device_module(device)


def lock_pages(pointer: int, size: int) -> int:
    """Page-lock host memory for copies to the device; return 0 or the driver's error code."""
    cudart: Any = torch.cuda.cudart()
    return int(cudart.cudaHostRegister(pointer, size, 0))


def unlock_pages() -> Callable[[int], object]:
    """Return the function that undoes lock_pages.

    Get it early: modules may be gone when the process exits.
    """
    cudart: Any = torch.cuda.cudart()
    return cudart.cudaHostUnregister


def copy_async(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device without making the host wait for earlier work of the device."""
    if values.device.type != "cpu" or device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- compute type and threads


def choose_dtype(name: str, device: torch.device) -> str:
    """Return the compute type of `model.dtype`.

    auto is bfloat16 where the device multiplies it clearly faster than float32.
    """
    if name != "auto":
        return name
    if device.type != "cpu":
        # The module of mps has no such function.
        is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        return "bfloat16" if is_supported is not None and is_supported() else "float32"
    seconds = {dtype: _matmul_seconds(dtype) for dtype in DTYPES}
    return "bfloat16" if seconds["bfloat16"] * 1.5 < seconds["float32"] else "float32"


def matmul_flops(dtype: str) -> float:
    """Return the measured operations per second of a 512 x 512 matrix product on the CPU."""
    return 2 * 512**3 / _matmul_seconds(dtype)


def _matmul_seconds(dtype: str) -> float:
    """Return the seconds of a 512 x 512 matrix product on the CPU.

    If the CPU only emulates the type, such a product takes seconds. The time is then estimated from
    a 128 x 128 product.
    """
    small = torch.ones(128, 128, dtype=DTYPES[dtype])
    small_s = best_seconds(lambda: small @ small, repeats=5)
    if 2 * 128**3 / small_s < EMULATED_FLOPS:
        return (512 / 128) ** 3 * small_s
    large = torch.ones(512, 512, dtype=DTYPES[dtype])
    return best_seconds(lambda: large @ large, repeats=5)


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the least of the measured times of `work`, after one call that is not measured."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


# ---- memory


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on the accelerator if it has its own, else RSS."""
    if has_own_memory(device):
        allocated = torch.get_device_module(device).max_memory_allocated(device)
        outside = sum(_GraphMemory.held.values()) + _GraphMemory.attached
        return max(allocated + outside, _GraphMemory.peak)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_held(device: torch.device) -> int:
    """Return the accelerator memory that this process holds now; 0 if it has none of its own."""
    if not has_own_memory(device):
        return 0
    return torch.get_device_module(device).memory_allocated(device) + _GraphMemory.attached


def graph_memory_bytes() -> int:
    """Return the memory of captured graphs, which memory_held does not count."""
    return sum(_GraphMemory.held.values())


def attached_memory_bytes() -> int:
    """Return the memory that DetachableMemory has attached: the cache of keys and values."""
    return _GraphMemory.attached


def is_memory_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is a lack of memory.

    If memory runs out while a graph is captured, ending the capture fails with another error.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def requested_memory(error: str) -> str:
    """Return " for 2.00 GiB more" from the text of an out-of-memory error; "" if it has no size."""
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", error)
    return f" for {wanted[1]} more" if wanted else ""


def free_memory_bytes(device: torch.device) -> int:
    """Return the accelerator memory that is free or cached unused by torch."""
    module = torch.get_device_module(device)
    free, _ = memory_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and total bytes of an accelerator with its own memory."""
    return torch.get_device_module(device).mem_get_info(device)


def other_processes_bytes(device: torch.device) -> int:
    """Return the accelerator memory that other processes hold; 0 if the device has none of its own.

    Includes what the driver itself holds for this process, such as its context.
    """
    if not has_own_memory(device):
        return 0
    free, total = memory_info(device)
    reserved = torch.get_device_module(device).memory_reserved(device)
    return max(0, total - free - reserved - _GraphMemory.attached)


def total_memory_bytes(device: torch.device) -> int:
    """Return the total memory of the device; for the CPU that of the machine."""
    if has_own_memory(device):
        return torch.get_device_module(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- descriptions


def describe_device(device: torch.device) -> str:
    """Return the device's product name if torch knows it, else its kind."""
    if device.type == "mps":
        return "Apple GPU"
    if not has_own_memory(device):
        return device.type
    name = str(torch.get_device_module(device).get_device_name(device))
    return f"{name}, ROCm {torch.version.hip}" if torch.version.hip else name


def unusable_gpu_hint() -> str:
    """Return advice about an NVIDIA GPU that torch cannot use; empty if there is none."""
    if torch.cuda.is_available() or not Path("/dev/nvidia0").exists():
        return ""
    return (
        f"this machine has an NVIDIA GPU but torch {torch.__version__} cannot use it: "
        "install a CUDA build of torch"
    )
