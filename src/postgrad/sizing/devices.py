"""GPUs by name: memory, arithmetic and bandwidth, so that a run can be planned without them."""

from dataclasses import dataclass, replace

from postgrad.errors import ConfigError, did_you_mean

GIB = 2**30
# What an H200 reaches of its data sheet: 790 of 989 TFLOP/s in a large bfloat16 product, and 4.3
# of 4.8 TB/s in a copy. The other devices are assumed to reach the same shares.
ARITHMETIC_SHARE = 790 / 989
BANDWIDTH_SHARE = 4.3 / 4.8
# Memory that a process cannot use: CUDA's context, workspaces of libraries, gaps between tensors.
UNUSABLE_BYTES = 1 * GIB
# Host memory to a device and back at the same time, page-locked: 18.5 GB in 0.376 s (docs/lab.md).
HOST_BANDWIDTH = 49e9


@dataclass(frozen=True)
class GpuSpec:
    """What one GPU has and reaches."""

    name: str
    memory: int  # bytes that torch sees
    flops: float  # bfloat16 operations per second of a large matrix product
    bandwidth: float  # bytes per second of its memory
    host_bandwidth: float = HOST_BANDWIDTH  # bytes per second, each way

    @property
    def usable(self) -> int:
        """Bytes that a run may use."""
        return max(0, self.memory - UNUSABLE_BYTES)


def _spec(name: str, gib: float, teraflops: float, terabytes: float, host: float) -> GpuSpec:
    return GpuSpec(
        name,
        round(gib * GIB),
        ARITHMETIC_SHARE * teraflops * 1e12,
        BANDWIDTH_SHARE * terabytes * 1e12,
        host,
    )


# GiB that torch sees; dense bfloat16 TFLOP/s and TB/s of the data sheet. PCIe 4 has half the
# bandwidth of PCIe 5 to the host.
KNOWN = {
    spec.name: spec
    for spec in (
        _spec("a100", 79.3, 312, 2.04, HOST_BANDWIDTH / 2),
        _spec("a100-40", 39.4, 312, 1.56, HOST_BANDWIDTH / 2),
        _spec("b200", 178.0, 2250, 8.0, HOST_BANDWIDTH),
        _spec("h100", 79.2, 989, 3.35, HOST_BANDWIDTH),
        _spec("h200", 139.8, 989, 4.8, HOST_BANDWIDTH),
        _spec("l4", 22.0, 121, 0.3, HOST_BANDWIDTH / 2),
        _spec("l40s", 44.4, 362, 0.864, HOST_BANDWIDTH / 2),
        _spec("rtx4090", 23.5, 165, 1.01, HOST_BANDWIDTH / 2),
    )
}


def find_gpu(name: str, gib: float | None = None) -> GpuSpec:
    """Return the GPU of this name, with `gib` GiB of memory if given. Raises ConfigError."""
    spec = KNOWN.get(name.lower())
    if spec is None:
        hint = did_you_mean(name, list(KNOWN))
        raise ConfigError(f"--device {name} is not a known GPU; {hint}")
    return spec if gib is None else replace(spec, memory=round(gib * GIB))
