"""Actors that the tests of a module reuse: importing torch in a new actor takes seconds."""

from typing import Any

from postgrad.cluster.actor_pool import ActorPool
from postgrad.cluster.rank_actor import RankActor

IDLE: list[Any] = []  # handles of actors without models
RESET_S = 10.0


class ReusableRank(RankActor):
    """A rank that can drop its models, and fail, hang or die in a call."""

    def reset(self) -> None:
        import gc

        import torch.distributed as dist

        self.ports = {}
        self.listener = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def die_at(self, port: str, method: str, times: int = 1, mark: str = "") -> None:
        """Kills this actor in the `times`-th call of a port's method; touches the file `mark`."""
        import os
        import signal
        from pathlib import Path

        target = self.ports[port][1]
        original = getattr(target, method)
        num_calls = 0

        def deadly(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == times:
                if mark:
                    Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        setattr(target, method, deadly)

    def die_between_files(self, num_saves: int) -> None:
        """Kills this actor in its `num_saves`-th save, after the first of its files is written."""
        import os
        import signal

        from postgrad.model.checkpoint_files import TensorsFile

        policy = self.ports["policy"][1]
        save = policy.save
        write = TensorsFile.write
        num_begun = 0

        def count_and_save(folder: str) -> None:
            nonlocal num_begun
            num_begun += 1
            save(folder)

        def write_and_die(file: TensorsFile) -> None:
            write(file)
            if num_begun == num_saves:
                os.kill(os.getpid(), signal.SIGKILL)

        policy.save = count_and_save
        TensorsFile.write = write_and_die  # this process ends with it

    def hang_at(self, port: str, method: str) -> None:
        import time

        setattr(self.ports[port][1], method, lambda *arguments: time.sleep(600))

    def fail_at(self, port: str, method: str, message: str) -> None:
        from postgrad.errors import RunError

        def fail(*arguments: Any) -> Any:
            raise RunError(message)

        setattr(self.ports[port][1], method, fail)


def create_actor(self: ActorPool, placement: Any) -> Any:
    """Replaces ActorPool.create_actor: takes an idle actor if there is one."""
    if IDLE:
        return IDLE.pop()
    return self.ray.remote(ReusableRank).options(num_cpus=1, max_restarts=0).remote()


def close(self: ActorPool) -> None:
    """Replaces ActorPool.close: keeps the actors that still answer.

    All are asked before the first answer: one that waits for a lost rank ends its wait only when
    the others leave their process group. A lost rank closes the pool, and so does its user after
    that: then its actors are idle or dead.
    """
    hangs = "did not answer" in getattr(self, "lost_reason", "")
    used = [worker.handle for worker in self.workers if worker.handle not in IDLE]
    answers: dict[Any, Any] = {}
    for handle in used:
        if not hangs and hasattr(handle, "reset"):  # actors of verifiers have none
            answers[handle] = handle.reset.remote()
    for handle in used:
        try:
            self.ray.get(answers[handle], timeout=RESET_S)
            IDLE.append(handle)
        except Exception:
            self.ray.kill(handle)
