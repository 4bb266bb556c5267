"""The blocks of a model as the decode step reads them: weights, norms, MLP, window and rotary kind.

A block is described by data, so the decode step has one code path for all families.
"""

from typing import Any

from torch import Tensor

from postgrad.model.kernels.install import Norm, is_gelu, read_norm
from postgrad.model.kernels.linear import decode_linear
from postgrad.model.kernels.swiglu import swiglu_forward
from postgrad.model.lora import base_layer
from postgrad.model.passes.support import window_of


class Layer:
    """One transformer block."""

    def __init__(self, block: Any, rotary: str) -> None:
        attention = block.self_attn
        self.qkv = attention.fused_params
        self.qkv_modules = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.output = attention.o_proj
        self.scale: float = attention.scaling
        self.window = window_of(attention)
        self.rotary = rotary  # see views.rotary_kinds
        self.q_norm = read_norm(getattr(attention, "q_norm", None))
        self.k_norm = read_norm(getattr(attention, "k_norm", None))
        self.input_norm = known_norm(block.input_layernorm)
        # Norms of a branch's output, before it is added to the residual.
        self.attention_post_norm: Norm | None = None
        self.mlp_post_norm: Norm | None = None
        if hasattr(block, "pre_feedforward_layernorm"):
            self.attention_post_norm = known_norm(block.post_attention_layernorm)
            self.mlp_norm = known_norm(block.pre_feedforward_layernorm)
            self.mlp_post_norm = known_norm(block.post_feedforward_layernorm)
        else:
            self.mlp_norm = known_norm(block.post_attention_layernorm)
        self.mlp = block.mlp

    def project_qkv(self, x: Tensor) -> Tensor:
        return decode_linear(x, self.qkv, self.qkv_modules)

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's output for x (rows, width); experts are routed by the stock module."""
        mlp = self.mlp
        if hasattr(mlp, "experts"):
            return mlp(x[None])[0]
        modules = [mlp.gate_proj, mlp.up_proj]
        gate_up = decode_linear(x, mlp.fused_params, modules)
        return project(mlp.down_proj, swiglu_forward(gate_up, is_gelu(mlp)))


def known_norm(module: Any) -> Norm:
    """Return what a norm computes. The decoder is not built for norms that are not known."""
    norm = read_norm(module)
    assert norm is not None
    return norm


def project(module: Any, x: Tensor) -> Tensor:
    """Apply one linear layer and its LoRA adapter, if it has one."""
    base = base_layer(module)
    return decode_linear(x, (base.weight, base.bias), [module])
