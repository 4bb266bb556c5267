"""Devices are chosen by torch's own word for the accelerator, and only one file names a kind of hardware."""

from pathlib import Path

import pytest
import torch

import postgrad
from postgrad.errors import ConfigError
from postgrad.model import device as devices


def test_one_file_names_the_hardware():
    """Everything else asks model/device.py, so that another accelerator is an edit of that file."""
    source = Path(postgrad.__file__).parent
    naming = {
        str(file.relative_to(source)) for file in source.rglob("*.py") if "cuda" in file.read_text()
    }
    assert naming == {"model/device.py"}


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_auto_takes_the_accelerator_that_torch_names(monkeypatch, kind):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.choose_device("auto") == torch.device(kind) == devices.choose_device(kind)
    assert devices.choose_device("cpu").type == "cpu"
    assert devices.accelerators() == [torch.device(kind, 0), torch.device(kind, 1)]
    other = "mps" if kind != "mps" else "xpu"
    with pytest.raises(
        ConfigError,
        match=f"model.device={other} is not there on this machine; use model.device=auto",
    ):
        devices.choose_device(other)


def test_without_an_accelerator_there_is_the_cpu(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert devices.choose_device("auto").type == "cpu" and devices.accelerators() == []
    with pytest.raises(ConfigError, match="pip install torch_npu"):
        devices.choose_device("npu")
    with pytest.raises(
        ConfigError, match=r"model.device=gpu is not a kind of device; use model.device=auto"
    ):
        devices.choose_device("gpu")


@pytest.mark.parametrize(
    ("answer", "wanted"), [(True, "bfloat16"), (False, "float32"), (None, "float32")]
)
def test_an_accelerator_computes_in_bfloat16_where_it_says_it_can(monkeypatch, answer, wanted):
    module = type(
        "Module", (), {} if answer is None else {"is_bf16_supported": staticmethod(lambda: answer)}
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.choose_dtype("auto", torch.device("xpu")) == wanted


def test_only_one_kind_gets_the_kernels_and_the_tricks():
    mine = torch.device("cuda")
    for question in (
        devices.supports_graph_capture,
        devices.supports_state_streaming,
        devices.has_float32_accumulation,
        devices.has_own_memory,
    ):
        assert (
            question(mine)
            and not question(torch.device("cpu"))
            and not question(torch.device("mps"))
        )
    assert not devices.supports_triton(torch.device("xpu")) and devices.has_own_memory(
        torch.device("xpu")
    )
    assert [kind for kind in devices.KINDS if devices.is_gpu(kind)] == ["cuda", "xpu"]
    backends = [torch.distributed.get_default_backend_for_device(kind) for kind in ("cpu", "cuda")]
    assert backends == ["gloo", "nccl"], "what ranks talk through"
