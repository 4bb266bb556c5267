"""Actors that outlive a run: importing torch costs seconds, so the tests of a module hand the same processes from run to run."""

from typing import Any

from postgrad.cluster.rank import Rank
from postgrad.cluster.ray_backend import Actors

IDLE: list[Any] = []


class WarmRank(Rank):
    """A rank that can be told to forget, and to die in the middle of a call."""

    def forget(self) -> None:
        import gc

        import torch.distributed as dist

        self.ports, self.listener = {}, None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def die_at(self, port: str, method: str, times: int = 1, mark: str = "") -> None:
        """Die in the `times`-th call of a port's method, once it is at work; the file `mark` then says when."""
        import os
        import signal
        from pathlib import Path

        target = self.ports[port][1]
        real, left = getattr(target, method), [times]

        def deadly(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if mark:
                    Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(target, method, deadly)

    def hang_at(self, port: str, method: str) -> None:
        import time

        setattr(self.ports[port][1], method, lambda *arguments: time.sleep(600))

    def fail_at(self, port: str, method: str, overrides: str) -> None:
        from postgrad.errors import RunError

        def fail(*arguments: Any) -> Any:
            raise RunError(overrides)

        setattr(self.ports[port][1], method, fail)


def make(self: Actors) -> Any:
    if IDLE:
        return IDLE.pop()
    return self.ray.remote(WarmRank).options(num_cpus=1, max_restarts=0).remote()


def close(self: Actors) -> None:
    """Keep those that still answer."""
    broken = getattr(self, "broken", "")
    for member in self.members:
        try:
            if broken:
                raise RuntimeError(broken)
            self.ray.get(member.handle.forget.remote(), timeout=10)
            IDLE.append(member.handle)
        except Exception:
            self.ray.kill(member.handle)
