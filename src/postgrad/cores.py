"""The CPU cores that this process may use."""

import os


def available_cores() -> int:
    """Return the number of CPU cores that this process may use.

    Linux can restrict a process to some of them (taskset, containers); macOS cannot.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
