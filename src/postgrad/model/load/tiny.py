"""A tiny transformers model made in code: Qwen3 blocks, random weights, a 16-character tokenizer.

It needs no download and learns arithmetic in a minute on a CPU. The demo and the tests train it.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*()="
PAD = "<pad>"
END = "<end>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, then padding and end."""
    tokens = [*CHARACTERS, PAD, END]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def make_tiny(
    folder: Path, seed: int, layers: int = 2, width: int = 128, heads: int = 4, tied: bool = True
) -> Path:
    """Write the model as a stock Hugging Face folder; return the folder."""
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
