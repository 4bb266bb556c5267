"""Replaces forward methods of a stock transformers model by the Triton kernels.

Parameter names, weights and checkpoints stay those of the stock model.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from postgrad.model.kernels.heads import HeadNorms, projected_heads
from postgrad.model.kernels.linear import fuse_linears, fused_linear
from postgrad.model.kernels.packed_attention import packed_attention
from postgrad.model.kernels.rms_norm import rms_norm
from postgrad.model.kernels.swiglu import swiglu, swiglu_down, swiglu_down_with_adapter
from postgrad.model.lora import adapter_products, base_layer, has_hooks
from postgrad.model.optimizers.gradient_sums import has_master
from postgrad.model.passes.attention import attention
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.sequence import AnyPacking, DividedTokens
from postgrad.model.passes.support import window_of
from postgrad.model.quantized import QuantizedLinear

ATTENTION_CLASSES = (
    "Gemma3Attention",
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
    "Qwen3VLTextAttention",
)
MLP_CLASSES = (
    "Gemma3MLP",
    "LlamaMLP",
    "MistralMLP",
    "Qwen2MLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
    "Qwen3VLTextMLP",
)
ACTIVATIONS = (GELUTanh, SiLUActivation, nn.SiLU)
CENTERED_NORMS = ("Gemma3RMSNorm",)  # they multiply by 1 + weight


class Norm(NamedTuple):
    """What a RMSNorm computes."""

    weight: Tensor
    eps: float
    centered: bool


def read_norm(module: Any) -> Norm | None:
    """Return what a stock norm computes; None where the kernels do not know its class."""
    class_name = type(module).__name__
    if class_name in CENTERED_NORMS:
        return Norm(module.weight, module.eps, True)
    if class_name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return Norm(module.weight, module.variance_epsilon, False)
    return None


def is_gelu(mlp: Any) -> bool:
    """Return whether the gate of an MLP with kernels is gelu; otherwise it is silu."""
    return isinstance(mlp.act_fn, GELUTanh)


def install_kernels(model: nn.Module, fuse: bool = True) -> None:
    """Let the norms, MLPs and attention layers of a stock model compute with these kernels.

    Modules of other classes are left as they are. `fuse` multiplies the matrices that read one
    input as one matrix, so they must stay where they are in memory. Without it each layer is
    called by itself: FSDP2 gathers and frees matrices, and layers in slices have hooks that
    exchange tensors.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        class_name = type(module).__name__
        if read_norm(module) is not None:
            module.forward = MethodType(_norm_forward, module)
        elif class_name in MLP_CLASSES and isinstance(module.act_fn, ACTIVATIONS):
            if fuse:
                module.fused_params = fuse_linears([module.gate_proj, module.up_proj])
            module.forward = MethodType(_mlp_forward, module)
        elif class_name in ATTENTION_CLASSES:
            if fuse:
                module.fused_params = fuse_linears([module.q_proj, module.k_proj, module.v_proj])
            module.forward = MethodType(_attention_forward, module)


def remove_kernels(model: nn.Module) -> None:
    """Undo install_kernels: the modules compute with their stock forward methods again."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        forward = vars(module).get("forward")
        if getattr(forward, "__func__", None) in (_norm_forward, _mlp_forward, _attention_forward):
            del module.forward
            vars(module).pop("fused_params", None)


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    norm = read_norm(module)
    assert norm is not None
    return rms_norm(hidden_states, *norm)


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    *args: Any,
    packing: AnyPacking | None = None,
    **kwargs: Any,
) -> Any:
    """Packed passes use fewer, larger kernels; other passes use the stock module's forward."""
    if packing is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    cos, sin = kwargs["position_embeddings"]
    x = hidden_states[0]
    projections = [module.q_proj, module.k_proj, module.v_proj]
    if hasattr(module, "fused_params"):
        qkv = fused_linear(x, module.fused_params, projections)
        num_heads = module.q_proj.out_features // module.head_dim
    else:
        outputs = [projection(x) for projection in projections]
        qkv = torch.cat(outputs, dim=1)
        num_heads = outputs[0].shape[1] // module.head_dim  # of this rank
    q, k, v = projected_heads(qkv, num_heads, cos[0], sin[0], _head_norms(module))
    if isinstance(packing, DividedTokens):
        query, key, value = (part.transpose(0, 1)[None] for part in (q, k, v.contiguous()))
        options = {"sliding_window": window_of(module) or None, "packing": packing}
        out, _ = attention(module, query, key, value, None, module.scaling, **options)
        return module.o_proj(out.reshape(1, len(x), -1)), None
    cache = kwargs.get("past_key_values")
    if cache is not None:
        kv = cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], module.layer_idx)
        k, v = (x[0].transpose(0, 1) for x in kv)  # after the new tokens, earlier ones may follow
    assert isinstance(packing, Packing)
    out = packed_attention(q, k, v, packing, module.scaling, window_of(module))
    return _output_projection(module.o_proj, out.view(1, len(x), -1)), None


def _head_norms(module: Any) -> HeadNorms | None:
    """Return the norms of an attention layer's query and key heads, if it has them."""
    if not hasattr(module, "q_norm"):
        return None
    query, key = read_norm(module.q_norm), read_norm(module.k_norm)
    assert query is not None and key is not None
    return HeadNorms(query.weight, key.weight, query.eps, query.centered)


def _output_projection(projection: Any, x: Tensor) -> Tensor:
    """Return the projection of x (1, tokens, width).

    One product adds the weight's gradient, or an adapter's output, if it can.
    """
    layer = base_layer(projection)
    if type(layer) not in (nn.Linear, QuantizedLinear) or has_hooks(projection):
        return projection(x)
    # The attribute `weight` of a 4-bit layer is a dequantized copy.
    weight = layer.quantized if isinstance(layer, QuantizedLinear) else layer.weight
    adds_gradient = isinstance(weight, Tensor) and has_master(weight)
    if adapter_products(projection) is None and not adds_gradient:
        return projection(x)
    return fused_linear(x[0], (weight, layer.bias), [projection])[None]


def _mlp_forward(module: Any, hidden_states: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    projections = [module.gate_proj, module.up_proj]
    if hasattr(module, "fused_params"):
        gate_up = fused_linear(x, module.fused_params, projections)
    else:
        gate_up = torch.cat([projection(x) for projection in projections], dim=1)
    out = _down_projection(module.down_proj, gate_up, is_gelu(module))
    return out.view(hidden_states.shape)


def _down_projection(down: Any, gate_up: Tensor, gelu: bool) -> Tensor:
    """Return the down projection of SwiGLU; its wide input is recomputed where it can be."""
    if type(down) is nn.Linear and not has_hooks(down):
        return swiglu_down(gate_up, down.weight, down.bias, gelu)
    adapter = adapter_products(down)
    if adapter is None:
        return down(swiglu(gate_up, gelu))
    layer = base_layer(down)
    weight = layer.quantized if isinstance(layer, QuantizedLinear) else layer.weight
    return swiglu_down_with_adapter(gate_up, weight, layer.bias, adapter, gelu)
