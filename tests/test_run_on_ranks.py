"""The helper that runs ranks reports a rank that dies at once, though others wait for it."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from ranks import run_on_ranks


def die_on_second_rank() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exit_on_first_rank() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    time.sleep(60)


def raise_on_second_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("an error of this rank")
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (die_on_second_rank, "rank 1: killed by signal 9"),
        (exit_on_first_rank, "rank 0: ended with exit code 3"),
        (raise_on_second_rank, "an error of this rank"),
    ],
)
def test_a_rank_that_dies_is_reported_at_once(work, expected, monkeypatch):
    monkeypatch.setattr("ranks.GRACE_S", 0.2)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=expected):
        run_on_ranks(2, work)
    assert time.monotonic() - begin < 30
