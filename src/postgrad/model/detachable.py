"""Device memory that can be given back for a while and keeps its address.

The cache of keys and values is needed while sampling only, and optimizer steps need the memory
then. CUDA graphs contain addresses, so the cache cannot be freed and allocated again. CUDA's
virtual memory functions separate the two: an address range stays reserved, and memory is attached
to it and detached from it.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import CacheMemoryError, RunError
from postgrad.model.device import empty_device_cache, memory_info, track_outside_memory

DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: ordinary device memory
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM_GRANULARITY = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _RawArray:
    """A device array that torch.as_tensor reads without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def driver_library(device: torch.device) -> Any:
    """Return CUDA's driver library; None where the device has none, such as with ROCm."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuMemAddressReserve") else None


class DetachableMemory:
    """Bytes on a CUDA device at a fixed address. New memory is attached.

    Args:
        library: of driver_library().
        size: bytes; rounded up to the driver's page size.
        device: a CUDA device.

    Raises:
        RunError: the device has not enough free memory.
    """

    def __init__(self, library: Any, size: int, device: torch.device) -> None:
        self.library = library
        self.device = device
        self._use_context()
        index = torch.cuda.current_device() if device.index is None else device.index
        location = _Location(DEVICE, index)
        self.properties = _Properties(type=PINNED, location=location)
        self.access = _Access(location, READ_WRITE)
        granularity = ctypes.c_size_t()
        self._check(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self.properties),
            MINIMUM_GRANULARITY,
        )
        self.size = -(-size // granularity.value) * granularity.value
        self.address = ctypes.c_uint64()
        self._check(
            "cuMemAddressReserve",
            ctypes.byref(self.address),
            ctypes.c_size_t(self.size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.handle = ctypes.c_uint64()
        self.attached = False
        self.attach()

    def attach(self) -> None:
        """Attach memory, whose content is undefined, unless there is some. Raises RunError."""
        if self.attached:
            return
        self._use_context()
        free, _ = memory_info(self.device)
        if free < self.size:  # torch keeps freed memory; make it return what it does not use
            empty_device_cache(self.device)
        size = ctypes.c_size_t(self.size)
        no_flags = ctypes.c_uint64(0)
        self._check(
            "cuMemCreate", ctypes.byref(self.handle), size, ctypes.byref(self.properties), no_flags
        )
        self._check("cuMemMap", self.address, size, ctypes.c_size_t(0), self.handle, no_flags)
        self._check(
            "cuMemSetAccess", self.address, size, ctypes.byref(self.access), ctypes.c_size_t(1)
        )
        self.attached = True
        track_outside_memory(self.device, self.size)

    def detach(self) -> None:
        """Give the memory back to the device. The address stays reserved."""
        if not self.attached:
            return
        torch.cuda.synchronize(self.device)
        track_outside_memory(self.device, -self.size)
        self._check("cuMemUnmap", self.address, ctypes.c_size_t(self.size))
        self._check("cuMemRelease", self.handle)
        self.attached = False

    def close(self) -> None:
        """Give back memory and address. Tensors of this memory must not be used any more."""
        self.detach()
        self._check("cuMemAddressFree", self.address, ctypes.c_size_t(self.size))

    def tensor(self) -> Tensor:
        """Return the memory as bytes, a uint8 tensor (size,)."""
        return torch.as_tensor(_RawArray(self.address.value, self.size), device=self.device)

    def _use_context(self) -> None:
        """Make torch's context the current one of this thread, which the driver requires."""
        torch.zeros(1, device=self.device)

    def _check(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises RunError if it fails."""
        code = getattr(self.library, name)(*arguments)
        if code == OUT_OF_MEMORY:
            free, _ = memory_info(self.device)
            raise CacheMemoryError(
                f"the cache of keys and values needs {self.size / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free",
                "lower rollout.cache_gib or rollout.max_rows",
            )
        if code != 0:
            raise RunError(f"the CUDA driver's {name} failed with error code {code}")
