"""The attention kernels of wide heads, compiled for GPUs that are not here."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from postgrad.model.kernels import wide_attention as wide  # noqa: E402
from postgrad.model.passes.packing import BLOCK_M  # noqa: E402

SMALL = 99 << 10  # shared memory of a program on an L40S (compute capability 8.9)
FLOATS = ("lse_ptr", "delta_ptr", "dk_ptr", "dv_ptr")


def shared_bytes(kernel: Any, capability: int, options: dict[str, int], **constants: Any) -> int:
    """Compile a kernel for bfloat16 heads of 128; return the shared memory that it needs."""
    constants |= {"GROUP": 4, "D": 128, "WIDTH": 128}
    constants |= {key: value for key, value in options.items() if not key.startswith("num_")}
    launch = {key: value for key, value in options.items() if key.startswith("num_")}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "*fp32"
        elif name == "tiles_ptr":
            signature[name] = "*i32"
        elif name.startswith("scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "*bf16" if name.endswith("_ptr") else "i32"
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    values = {places[name]: value for name, value in constants.items()}
    # A launch finds that addresses and strides are multiples of 16, so that loads run ahead.
    aligned = [name for name, kind in signature.items() if kind not in ("constexpr", "fp32")]
    hints = {places[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    return compiled.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_query_gradients_fit_the_shared_memory_of_a_gpu(is_small: bool) -> None:
    options = wide.TWO_HEADS | (wide.FEWER_STAGES if is_small else {})
    needed = shared_bytes(wide._wide_attention_query_gradient, 89, options, M=BLOCK_M)
    assert needed <= (SMALL if is_small else wide.QUERY_GRADIENT_BYTES)
    assert is_small or needed > SMALL, "fewer stages are not needed"


@pytest.mark.slow
def test_the_forward_pass_fits_little_shared_memory() -> None:
    needed = shared_bytes(wide._wide_attention_forward, 89, wide.TWO_HEADS, M=BLOCK_M)
    assert needed <= SMALL
