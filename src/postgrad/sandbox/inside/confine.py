"""The last limits, set from within before anything untrusted runs: they cannot be raised again."""

import os
import resource
from typing import Any

MIB = 1 << 20


def confine(settings: dict[str, Any]) -> None:
    """Limit memory, processor time, file size, open files and threads; give up root where the sandbox was made by root.

    settings: memory_mb, file_mb, cpu_s, threads, and uid (0: the user namespace has done that already).
    """
    limits = {
        resource.RLIMIT_AS: settings["memory_mb"] * MIB,
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: settings["file_mb"] * MIB,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: settings["threads"],
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if uid := settings["uid"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
