"""Runs a function on several ranks, child processes of the test."""

import io
import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 5.0  # after a rank has failed: the others may fail too, or wait for it


def run_on_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    start: str = "fork",
    backend: str = "gloo",
    answer_s: float = 240.0,
    collective_s: float = 200.0,
) -> list[Any]:
    """Return what `work(*arguments)` returned on each rank of a process group.

    `start` is "spawn" where the test's process uses CUDA, which forked processes cannot.
    `backend` is "staged" where ranks share a GPU. `answer_s` is the longest time for the work,
    `collective_s` the longest wait of a rank for another.

    Raises: AssertionError with the traceback or the exit code of each rank that failed. A rank that
    fails or dies is reported at once; the others, which may wait for it, are ended.
    """
    context: Any = multiprocessing.get_context(start)
    receivers: list[Any] = []
    processes: list[Any] = []
    folder = tempfile.TemporaryDirectory()  # of the file where the ranks find each other
    try:
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            group = {
                "backend": backend,
                "init_method": f"file://{folder.name}/store",
                "rank": rank,
                "world_size": size,
                "timeout": timedelta(seconds=collective_s),
            }
            process = context.Process(target=_rank_main, args=(group, sender, work, arguments))
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        results, failures = _wait_for_answers(processes, receivers, answer_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()
    assert not failures, "\n".join(failures)
    return [torch.load(io.BytesIO(results[rank]), weights_only=False) for rank in range(size)]


def _wait_for_answers(
    processes: list[Any], receivers: list[Any], answer_s: float
) -> tuple[dict[int, bytes], list[str]]:
    """Return the results by rank, and what failed."""
    results: dict[int, bytes] = {}
    failures: list[str] = []
    waiting = set(range(len(processes)))
    end = time.monotonic() + answer_s
    while waiting:
        watched: dict[Any, int] = {}
        for rank in waiting:
            watched[receivers[rank]] = rank
            watched[processes[rank].sentinel] = rank
        ready = multiprocessing.connection.wait(list(watched), max(0.0, end - time.monotonic()))
        if not ready:
            if not failures:
                failures.append(f"ranks {sorted(waiting)} did not answer in {answer_s:.0f} s")
            break
        for rank in {watched[one] for one in ready}:
            waiting.discard(rank)
            failure, result = _read_answer(processes[rank], receivers[rank])
            if failure:
                failures.append(f"rank {rank}: {failure}")
                end = min(end, time.monotonic() + GRACE_S)
            else:
                results[rank] = result
    return results, failures


def _read_answer(process: Any, receiver: Any) -> tuple[str, bytes]:
    """Return why the rank failed, or "" and its result. Its pipe is ready or its process ended."""
    try:
        if receiver.poll(0):
            return receiver.recv()
    except EOFError:
        pass
    process.join()
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name}) before it answered", b""
    return f"ended with exit code {code} before it answered", b""


def _rank_main(group: dict[str, Any], sender: Any, work: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        if group["backend"] == "staged":
            import staged  # noqa: F401 (registers the backend)
        dist.init_process_group(**group)
        result = io.BytesIO()  # tensors in shared memory would vanish with their process
        torch.save(work(*arguments), result)
        dist.barrier()  # a rank that ends closes connections that others may still need
        sender.send(("", result.getvalue()))
    except BaseException:
        sender.send((traceback.format_exc(), b""))
