"""GPUs by name, with their memory, so that a run can be planned without them."""

from dataclasses import dataclass

from postgrad.errors import ConfigError, did_you_mean

GIB = 2**30
# Memory that a process cannot use: CUDA's context, workspaces of libraries, gaps between tensors.
UNUSABLE_BYTES = 1 * GIB


@dataclass(frozen=True)
class GpuSpec:
    """One GPU and its memory."""

    name: str
    memory: int  # bytes that torch sees

    @property
    def usable(self) -> int:
        """Bytes that a run may use."""
        return max(0, self.memory - UNUSABLE_BYTES)


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


def find_gpu(name: str, gib: float | None = None) -> GpuSpec:
    """Return the GPU of this name, with `gib` GiB of memory if given. Raises ConfigError."""
    known = MEMORY_GIB.get(name.lower())
    if known is None:
        hint = did_you_mean(name, list(MEMORY_GIB))
        raise ConfigError(f"--device {name} is not a known GPU; {hint}")
    return GpuSpec(name.lower(), round((known if gib is None else gib) * GIB))
