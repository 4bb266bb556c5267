"""The number of CPU threads of a run."""

import pytest
import torch
from tiny_runs import config_of

from postgrad.cores import available_cores
from postgrad.training import prepare


def test_a_gpu_run_takes_the_cores_without_measuring_them(tiny, monkeypatch):
    """The measurement takes two seconds of each start, and says nothing about a GPU's work."""
    monkeypatch.setattr(prepare, "probe_threads", lambda *_: pytest.fail("measured"))
    config = config_of("grpo", tiny)
    assert prepare._choose_threads(config, torch.device("cuda")) == available_cores()


def test_a_cpu_run_takes_the_fastest_number(tiny, monkeypatch):
    monkeypatch.setattr(prepare, "probe_threads", lambda *_: 3)
    config = config_of("grpo", tiny)
    assert prepare._choose_threads(config, torch.device("cpu")) == 3


def test_cores_are_counted_where_processes_cannot_be_restricted(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert available_cores() == 5
