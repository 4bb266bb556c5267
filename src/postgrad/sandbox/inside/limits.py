"""Resource limits that a sandboxed process sets for itself before it runs untrusted code.

They are hard limits: the process cannot raise them again.
"""

import os
import resource
from typing import Any

MIB = 1 << 20
OPEN_FILES = 64


def apply_limits(settings: dict[str, Any]) -> None:
    """Limit memory, processor time, file size, open files and threads; give up root.

    Args:
        settings: memory_mb, file_mb, cpu_s, threads and uid. uid 0 keeps the user id: the user
            namespace has no privileges to give up.
    """
    limits = {
        resource.RLIMIT_AS: settings["memory_mb"] * MIB,
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: settings["file_mb"] * MIB,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: settings["threads"],
    }
    for kind, limit in limits.items():
        _, hard_limit = resource.getrlimit(kind)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(kind, (limit, limit))
    uid = settings["uid"]
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
