"""What this machine has for this process: CPU cores and optional packages."""

import importlib.util
import math
import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds per period, or max


def available_cores() -> int:
    """Return the number of CPU cores that this process may use.

    Linux can restrict a process to some of them (taskset) and a container to a share of their time
    (docker run --cpus=2); macOS cannot.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, _quota_cores() or cores)


def _quota_cores() -> int:
    """Return how many cores the time of the container amounts to, rounded up; 0: no limit."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # another system, or max: no limit
        return 0


def is_installed(module: str) -> bool:
    """Return whether a module can be imported.

    A plain folder of that name in the working directory, such as the one that wandb writes, is no
    package, although Python would import it as an empty one.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
