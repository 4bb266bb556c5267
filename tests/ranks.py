"""Runs a function on several ranks, child processes of the test."""

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    start: str = "fork",
    backend: str = "gloo",
) -> list[Any]:
    """Return what `work(*arguments)` returned on each rank of a process group.

    `start` is "spawn" where the test's process uses CUDA, which forked processes cannot.
    `backend` is "staged" where ranks share a GPU.

    Raises: AssertionError with the traceback of a rank that failed.
    """
    context: Any = multiprocessing.get_context(start)
    pipes = [context.Pipe() for _ in range(size)]
    processes: list[Any] = []
    folder = tempfile.TemporaryDirectory()  # of the file where the ranks find each other
    for rank, (_, sender) in enumerate(pipes):
        process = context.Process(
            target=_rank_main, args=(rank, size, backend, folder.name, sender, work, arguments)
        )
        process.start()
        processes.append(process)
    answers: list[tuple[str, bytes]] = []
    try:
        for receiver, _ in pipes:
            assert receiver.poll(240), "a rank did not answer"
            answers.append(receiver.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()
    failures = [failure for failure, _ in answers if failure]
    assert not failures, "\n".join(failures)
    return [torch.load(io.BytesIO(result), weights_only=False) for _, result in answers]


def _rank_main(
    rank: int, size: int, backend: str, folder: str, sender: Any, work: Any, arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if backend == "staged":
            import staged  # noqa: F401 (registers the backend)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=200),
        )
        result = io.BytesIO()  # tensors in shared memory would vanish with their process
        torch.save(work(*arguments), result)
        dist.barrier()  # a rank that ends closes connections that others may still need
        sender.send(("", result.getvalue()))
    except BaseException:
        sender.send((traceback.format_exc(), None))
