"""Tiny random models of the architectures people train, made from their configuration classes."""

from pathlib import Path
from typing import Any

import torch

from postgrad.model.passes.head import head_of
from postgrad.model.port import FULL

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT: dict[str, Any] = {**MOE, "shared_expert_intermediate_size": 32}
LINEAR: dict[str, Any] = {  # three recurrent layers, then one of attention
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT: dict[str, Any] = {  # keys and values from one small vector
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
# model type -> what differs from COMMON. Windows are 8 tokens, so that short rows exceed them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "ministral3": {},
    "smollm3": {},
    "phi": {},
    "phi3": {},
    "glm4": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 4},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "gemma4_text": {"sliding_window": 8},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "cohere2": {"sliding_window": 8, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 8, "num_hidden_layers": 4},
    "starcoder2": {"sliding_window": 8},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 4},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 4},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_moe": MOE,
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "youtu": {**LATENT, "pad_token_id": None},
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **SHARED_EXPERT},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "logits_scaling": 4.0,
    },
    "mamba2": {
        "max_position_embeddings": None,  # a recurrent model has no longest row
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "expand": 2,
        "n_groups": 1,
        "chunk_size": 8,
    },
}


def make_family(
    model_type: str,
    vocab_size: int = 18,
    pad: int = 16,
    end: int = 17,
    seed: int = 0,
    sharp: bool = True,
    **changes: Any,
) -> Any:
    """Return a float32 model of this type.

    If it is `sharp`, its weights are large enough to make the errors of a small model visible.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"vocab_size": vocab_size, "pad_token_id": pad, "eos_token_id": end}
    settings = {**COMMON, **ids, **FAMILIES[model_type], **changes}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if sharp and parameter.dim() >= 2:
                parameter.mul_(3.0 if "embed" in name else 6.0)
        if (bias := head_of(model).bias) is not None:
            bias.normal_(generator=torch.Generator().manual_seed(seed))  # a new one is zero
    return model


def save_family(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write such a model with the tiny tokenizer as a stock Hugging Face folder."""
    from postgrad.model.load.tiny import tiny_tokenizer

    make_family(model_type, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class SumOfLogprobs:
    """The weighted sum of log-probs: its gradient is easy to compute in the stock model."""

    def view(self, step: int) -> Any:
        return FULL

    def lr_scales(self, names):
        return {}

    def target_ids(self, batch):
        return batch.response.values

    def row_groups(self, batch):
        return None

    def prepare(self, batch):
        return batch

    def loss(self, batch, current, metrics):
        return (current.logprobs * batch.tokens["advantages"]).sum()
