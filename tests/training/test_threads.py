"""The number of CPU threads of a run."""

import pytest
import torch
from tiny_runs import config_of

from postgrad.machine import available_cores
from postgrad.model import threads
from postgrad.training.resolve import choose_threads


def test_a_gpu_run_takes_the_cores_without_measuring_them(tiny, monkeypatch):
    """The measurement takes two seconds of each start, and says nothing about a GPU's work."""
    monkeypatch.setattr(threads, "probe_threads", lambda *_: pytest.fail("measured"))
    config = config_of("grpo", tiny)
    assert choose_threads(config, torch.device("cuda")) == available_cores()


def test_a_cpu_run_takes_the_fastest_number(tiny, monkeypatch):
    monkeypatch.setattr(threads, "probe_threads", lambda *_: 3)
    config = config_of("grpo", tiny)
    assert choose_threads(config, torch.device("cpu")) == 3


@pytest.mark.parametrize(("allowed", "most"), [("2", 2), ("3,1", 3), ("", 8), ("many", 8)])
def test_no_more_threads_are_tried_than_omp_num_threads(allowed, most, monkeypatch):
    tried: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setattr(threads.torch, "set_num_threads", tried.append)
    monkeypatch.setattr(threads, "best_seconds", lambda *_, **__: 1 / tried[-1])
    assert threads.probe_threads(8, "float32") == max(tried[:-1]) == most


def test_cores_are_counted_where_processes_cannot_be_restricted(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert available_cores() == 5
