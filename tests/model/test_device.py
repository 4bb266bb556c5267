"""The device is chosen by torch's name of the accelerator; one file names kinds of hardware."""

import functools
from pathlib import Path

import pytest
import torch
from refused import refused

import postgrad
from postgrad.model import device as devices


def test_one_file_names_the_hardware():
    """All other files call model/device.py, so another accelerator is an edit of that file.

    model/detachable.py calls the driver of one kind of hardware; without it nothing is detached.
    """
    source = Path(postgrad.__file__).parent
    files = [file for file in source.rglob("*.py") if "cuda" in file.read_text()]
    names = sorted(str(file.relative_to(source)) for file in files)
    assert names == ["model/detachable.py", "model/device.py"]


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_auto_is_the_accelerator_that_torch_names(monkeypatch, kind):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.choose_device("auto") == torch.device(kind)
    assert devices.choose_device(kind) == torch.device(kind)
    assert devices.choose_device("cpu").type == "cpu"
    assert devices.accelerators() == [torch.device(kind, 0), torch.device(kind, 1)]
    other = "mps" if kind != "mps" else "xpu"
    with refused("unsupported", "model.device"):
        devices.choose_device(other)


def test_auto_is_the_cpu_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert devices.choose_device("auto").type == "cpu"
    assert devices.accelerators() == []
    with refused("unsupported", "model.device"):
        devices.choose_device("npu")
    with refused("unknown_name", "model.device"):
        devices.choose_device("gpu")


@pytest.mark.parametrize(
    ("supported", "expected"), [(True, "bfloat16"), (False, "float32"), (None, "float32")]
)
def test_auto_dtype_is_bfloat16_where_the_accelerator_supports_it(monkeypatch, supported, expected):
    attributes = {}
    if supported is not None:
        attributes["is_bf16_supported"] = staticmethod(lambda: supported)
    module = type("Module", (), attributes)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.choose_dtype("auto", torch.device("xpu")) == expected


@pytest.mark.parametrize(("bfloat16_flops", "expected"), [(1e8, "float32"), (1e12, "bfloat16")])
def test_auto_dtype_makes_no_large_product_of_an_emulated_type(
    monkeypatch, bfloat16_flops, expected
):
    """A 512 x 512 product takes seconds where the CPU emulates bfloat16."""
    made = []

    def seconds(work, repeats):
        product = work()
        made.append((product.dtype, len(product)))
        flops = bfloat16_flops if product.dtype == torch.bfloat16 else 1e11
        return 2 * len(product) ** 3 / flops

    monkeypatch.setattr(torch, "ones", functools.partial(torch.ones, device="meta"))
    monkeypatch.setattr(devices, "best_seconds", seconds)
    assert devices.choose_dtype("auto", torch.device("cpu")) == expected
    assert ((torch.bfloat16, 512) in made) == (bfloat16_flops > devices.EMULATED_FLOPS)
    assert devices.matmul_flops("bfloat16") == pytest.approx(bfloat16_flops)


@pytest.mark.parametrize(
    "property_of",
    [
        devices.supports_graph_capture,
        devices.supports_state_streaming,
        devices.has_float32_accumulation,
        devices.has_own_memory,
    ],
)
def test_cuda_has_what_cpu_and_mps_lack(property_of):
    assert property_of(torch.device("cuda"))
    assert not property_of(torch.device("cpu"))
    assert not property_of(torch.device("mps"))


def test_xpu_is_a_gpu_with_its_own_memory_but_without_our_kernels():
    assert not devices.supports_triton(torch.device("xpu"))
    assert devices.has_own_memory(torch.device("xpu"))
    assert [kind for kind in devices.DEVICE_KINDS if devices.is_gpu(kind)] == ["cuda", "xpu"]


def test_torch_has_a_collective_backend_per_device():
    backends = [torch.distributed.get_default_backend_for_device(kind) for kind in ("cpu", "cuda")]
    assert backends == ["gloo", "nccl"]
