"""A Qwen3 model as Megatron Core's GPTModel, without Transformer Engine, on one device.

`make_megatron` builds it from a transformers model: it translates the configuration and copies the
weights. `to_megatron` translates weights or gradients by name. Attention is Megatron's own
("local") or torch's fused one ("sdpa"): Megatron's fused attention is part of Transformer Engine.
megatron_pass.py measures with it.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

LAYER_NAMES = {  # name in Megatron: name in transformers
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def to_megatron(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the weights or gradients of a transformers Qwen3 model by Megatron's names.

    `config` is the transformers configuration. Megatron joins query, key and value: for each
    key-value head its query heads, then the key, then the value. It joins gate and up, in this
    order. A tied head has no tensor of its own.
    """
    result = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        result["output_layer.weight"] = tensors["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        ours = f"model.layers.{i}."
        theirs = f"decoder.layers.{i}."
        for name, stock_name in LAYER_NAMES.items():
            result[theirs + name] = tensors[ours + stock_name]
        heads: list[Tensor] = []
        for letter in "qkv":
            projection = tensors[f"{ours}self_attn.{letter}_proj.weight"]
            heads.append(
                projection.view(config.num_key_value_heads, -1, config.head_dim, config.hidden_size)
            )
        joined = torch.cat(heads, dim=1).reshape(-1, config.hidden_size)
        result[theirs + "self_attention.linear_qkv.weight"] = joined
        gate = tensors[f"{ours}mlp.gate_proj.weight"]
        up = tensors[f"{ours}mlp.up_proj.weight"]
        result[theirs + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
    return result


class FusedAttention(nn.Module):
    """Causal attention by torch, with the arguments of Megatron's core attention."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        """Return (length, rows, width); the inputs are (length, rows, heads, head width)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def start_megatron(device: torch.device, collectives: str) -> None:
    """Start the process groups and random states that Megatron's layers ask for, for one rank.

    `collectives` is nccl or gloo.
    """
    from megatron.core import parallel_state, tensor_parallel

    store = Path(tempfile.mkdtemp()) / "store"
    torch.distributed.init_process_group(
        collectives, init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)


@contextlib.contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    """Replace what Megatron's layers ask of CUDA if the device is a CPU.

    Rotary embedding and attention scores go to the current CUDA device, and dropout (here 0) reads
    CUDA's random state.
    """
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    with fork, mock.patch("torch.cuda.current_device", lambda: device):
        yield


def make_megatron(stock: Any, device: torch.device, attention: str, fusions: bool) -> Any:
    """Return Megatron's GPTModel with the weights and the type of a transformers Qwen3.

    `attention` is local or sdpa. `fusions` are those that need torch.compile only: activation,
    residual addition and cross entropy. start_megatron() comes first.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = stock.config
    dtype = stock.get_input_embeddings().weight.dtype
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        masked_softmax_fusion=False,  # its kernel is compiled by Megatron-LM or Apex
        bias_activation_fusion=fusions,
        bias_dropout_fusion=fusions,
        cross_entropy_loss_fusion=fusions,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if attention == "sdpa":
        spec.submodules.self_attention.submodules.core_attention = FusedAttention
    model = GPTModel(
        settings,
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    parameters = dict(model.named_parameters())
    weights = to_megatron(dict(stock.named_parameters()), config)
    if parameters.keys() != weights.keys():
        raise ValueError(f"names differ: {sorted(parameters.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(weights[name])
    return model.to(device, dtype)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return Megatron's (1, 1, length, length) mask, true where a token is hidden."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)[None, None]
