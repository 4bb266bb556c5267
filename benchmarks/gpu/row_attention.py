"""Attention of one long training row: Postgrad's kernels beside those that torch has.

    python benchmarks/gpu/row_attention.py --out speed.jsonl
    python benchmarks/gpu/row_attention.py --lengths 128 --device cpu      # torch's only

Seconds of the forward and of the backward pass of one block's attention, and the share of the
GPU's arithmetic (790 TFLOP/s), for rows of random bfloat16 states with the heads of Qwen3's shapes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compare_common import ARITHMETIC
from rows import is_measured, write_row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS = {"0.6b": (16, 8), "4b": (32, 8)}
WIDTH = 128
BACKENDS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch math": SDPBackend.MATH,  # what a CPU has, to try this script
}


def with_postgrad(tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Return the function that a training pass calls, for one row without a prompt."""
    from postgrad.model.passes.kernels.packed_attention import packed_attention
    from postgrad.model.passes.packing import make_packing

    packing = make_packing([(0, tokens, 0, 0, tokens)]).to(device)
    return lambda q, k, v: packed_attention(q, k, v, packing, WIDTH**-0.5)


def with_torch(backend: SDPBackend) -> Callable[..., Tensor]:
    """Return torch's attention with this kernel; its layout is (1, heads, tokens, width)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return attend


def time_passes(attend: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass, best of three."""

    def now() -> float:
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    forward: list[float] = []
    backward: list[float] = []
    for _ in range(4):
        start = now()
        out = attend(*inputs)
        middle = now()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        forward.append(middle - start)
        backward.append(now() - middle)
    return min(forward[1:]), min(backward[1:])


def measure(shape: str, tokens: int, system: str, device: torch.device) -> dict[str, Any]:
    """Return seconds and shares of one system's attention, or why it cannot compute it."""
    heads, key_heads = HEADS[shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(tokens, count, WIDTH, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]
    try:
        is_ours = system == "postgrad"
        attend = with_postgrad(tokens, device) if is_ours else with_torch(BACKENDS[system])
        forward_s, backward_s = time_passes(attend, inputs)
    except RuntimeError as error:
        return {"failed": str(error).splitlines()[0][:200]}
    operations = 4 * heads * WIDTH * tokens * tokens / 2
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "forward_share": operations / forward_s / ARITHMETIC,
        "backward_share": 2.5 * operations / backward_s / ARITHMETIC,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--lengths", default="16384,65536", help="separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    args = parser.parse_args()
    device = torch.device(args.device)
    systems = ["torch math"]
    if device.type == "cuda":
        systems = ["postgrad", "torch cuDNN", "torch flash"]
    for tokens in map(int, args.lengths.split(",")):
        for shape in HEADS:
            name = f"attention {shape} {tokens}"
            for system in systems:
                if not is_measured(args.out, name, system):
                    write_row(args.out, name, system, **measure(shape, tokens, system, device))


if __name__ == "__main__":
    sys.exit(main())
