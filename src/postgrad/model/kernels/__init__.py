"""Triton kernels for CUDA devices, forward and backward; one file per operation.

- `packed_attention`: causal attention over packed tokens whose responses share their prompt.
- `rms_norm`, `heads`, `swiglu`, `linear`: the rest of a transformer block.
- `logprobs`: log-prob and entropy of the target tokens from their logits.
- `install`: replaces the forward methods of a stock model's modules by these kernels.

Import these files only where the device runs Triton. The same math in plain torch is the CPU path.
May import `postgrad.model.lora` and `quantized`, and `passes/packing`.
"""

from typing import Any

# A fused multiply-add skips a rounding that the stock modules make, and only in some kernels.
NO_FP_FUSION: dict[str, Any] = {"enable_fp_fusion": False}
