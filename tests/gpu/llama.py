"""The model of the GPU tests."""

from pathlib import Path

import torch


def make_llama(folder: Path, weight_scale: float = 1.0) -> Path:
    """Write a Llama of four blocks with 9 query and 3 key heads, as SmolLM2 has.

    Its matrices are multiplied by `weight_scale`; a larger scale gives sharper distributions.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from postgrad.model.load.tiny import make_tiny

    folder = make_tiny(folder, seed=0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=17,
    )
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in llama.parameters():
            if p.dim() == 2:
                p.mul_(weight_scale)
    llama.save_pretrained(folder)
    return folder
