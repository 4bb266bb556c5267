"""A tiny transformers model made in code: Qwen3 blocks, random weights, a 16-character tokenizer.

It needs no download and learns arithmetic in a minute on a CPU. The demo and the tests train it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

CHARACTERS = "0123456789+-*()="
# What the model that reads pictures has besides, for questions about shapes.
WORDS = ("how", " many", "what", " color", " is", " the", " circle", " square", " triangle", "s")
WORDS += ("?", "red", "green", "blue", "yellow")
PAD = "<pad>"
END = "<end>"


INITIALIZER_RANGE = 0.05  # with the usual 0.02 a small model takes long to begin to see
# Messages are their texts and pictures, without words around them.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>
            {%- else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == "assistant" %}<end>{% endif %}
{%- endfor %}"""


def tiny_tokenizer(words: Sequence[str] = (), **special_tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, padding, end and special tokens, then words."""
    tokens = [*CHARACTERS, PAD, END, *special_tokens.values(), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    pattern = "|".join([*map(re.escape, words), "(?m:.)"])  # m: also the end of a line
    tokenizer.pre_tokenizer = Split(Regex(pattern), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=special_tokens,
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
    return _save(folder, seed, Qwen3ForCausalLM, config, tokenizer)


def make_tiny_vision(folder: Path, seed: int, layers: int = 2, width: int = 128) -> Path:
    """Write a model of Qwen3-VL's architecture, which reads pictures of multiples of 16 pixels.

    Its tokenizer has the words of questions about shapes.
    """
    tokenizer = tiny_tokenizer(
        WORDS,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    tokenizer.chat_template = TEMPLATE
    vocabulary = tokenizer.get_vocab()
    text = {
        "vocab_size": len(tokenizer) - len(WORDS),  # with fewer words: the same other weights
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "pad_token_id": vocabulary[PAD],
        "eos_token_id": vocabulary[END],
        "bos_token_id": None,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [width // 16, width // 32, width // 32],
        },
    }
    tower = {
        "depth": 1,
        "hidden_size": width // 2,
        "intermediate_size": width,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 8,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": INITIALIZER_RANGE,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    _save(folder, seed, Qwen3VLForConditionalGeneration, config, tokenizer)
    size = {"shortest_edge": 16 * 16, "longest_edge": 512 * 512}
    pixels = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def _save(
    folder: Path,
    seed: int,
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
