"""Where a run computes: GPUs by name, so that a run can be planned without them, or this host."""

from dataclasses import dataclass

from postgrad.errors import UnknownName, did_you_mean

GIB = 2**30
# Memory that a process cannot use: CUDA's context, workspaces of libraries, gaps between tensors.
UNUSABLE_BYTES = 1 * GIB


@dataclass(frozen=True)
class Device:
    """One device and its memory.

    Attributes:
        name: as people call it.
        usable: bytes that a run may use.
        process: bytes of a process that has imported everything and loaded the data; 0 if only the
            accelerator's memory counts.
        kernel: bytes that a new shape of matrix product costs (oneDNN in bfloat16).
        detachable: the paged cache gives its memory back between rollouts, as with CUDA's driver.
    """

    name: str
    usable: int
    process: int = 0
    kernel: int = 0
    detachable: bool = True


MEMORY_GIB = {  # that torch sees
    "a100": 79.3,
    "a100-40": 39.4,
    "b200": 178.0,
    "h100": 79.2,
    "h200": 139.8,
    "l4": 22.0,
    "l40s": 44.4,
    "rtx4090": 23.5,
}


def make_gpu(name: str, memory: int) -> Device:
    """Return a GPU of which torch sees this many bytes."""
    return Device(name, max(0, memory - UNUSABLE_BYTES))


def find_gpu(name: str, gib: float | None = None) -> Device:
    """Return the GPU of this name, with `gib` GiB of memory if given. Raises ConfigError."""
    known = MEMORY_GIB.get(name.lower())
    if known is None:
        hint = did_you_mean(name, list(MEMORY_GIB))
        raise UnknownName(f"--device {name} is not a known GPU; {hint}")
    return make_gpu(name.lower(), round((known if gib is None else gib) * GIB))
