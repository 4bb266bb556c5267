"""What vLLM sees of the GPU's memory while it sleeps. Needs no vLLM and no GPU."""

import pytest
import torch

from postgrad.rollout.vllm import unchanged_memory_info


def test_another_process_may_take_memory_while_vllm_sleeps(monkeypatch):
    free = iter([100, 90, 80])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: (next(free), 200))
    with unchanged_memory_info():
        assert torch.accelerator.get_memory_info() == torch.accelerator.get_memory_info(0)
    assert torch.accelerator.get_memory_info() == (90, 200)
    with pytest.raises(OSError), unchanged_memory_info():
        raise OSError
    with pytest.raises(StopIteration):  # the real function is back
        torch.accelerator.get_memory_info()
