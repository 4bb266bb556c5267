"""Tiny random models of text and images with stock processor files, and pictures drawn in code."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from postgrad.config.schema import ModelConfig
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import load
from postgrad.model.load.picture_gate import picture_rows
from postgrad.model.passes.support import vision_of
from postgrad.pictures import Picture
from postgrad.rollout.engine import Request

COLORS = {"r": "red", "g": "green", "b": "blue", "y": "yellow"}
CHARACTERS = "0123456789+-*()=?rgby"
IDEFICS_TOKENS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
# What a chat template writes for a picture, and the tokens that surround its places.
PLACES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "qwen": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        ["<|vision_start|>", "<|vision_end|>"],
    ),
    "gemma": ("<boi>", {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}, []),
    "idefics": ("<image>", {"image_token": "<image>"}, IDEFICS_TOKENS),
    "internvl": (
        "<context>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<context>",
            "video_token": "<video>",
        },
        [],
    ),
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 32, "patch_size": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
LLAMA = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
QWEN_PIXELS = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
QWEN_PIXELS |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
SPLIT = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
# model type -> tokens, model settings, image processor, settings of the processor
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                **QWEN_VISION,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 64,
            },
        },
        QWEN_PIXELS,
        {},
    ),
    "qwen3_vl_moe": (
        "qwen",
        {
            "text_config": {**TEXT, **EXPERTS, "rope_parameters": MROPE},
            "vision_config": {
                **QWEN_VISION,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
        },
        QWEN_PIXELS,
        {},
    ),
    "qwen2_5_vl": (
        "qwen",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        QWEN_PIXELS,
        {},
    ),
    "qwen3_5": (
        "qwen",
        {
            "text_config": {**TEXT, **LINEAR, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 64},
        },
        QWEN_PIXELS,
        {},
    ),
    "gemma3": (
        "gemma",
        {
            "text_config": {**TEXT, "sliding_window": 16, "query_pre_attn_scalar": 8},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        {"image_seq_length": 4},
    ),
    "smolvlm": (
        "idefics",
        {"text_config": {**TEXT, **LLAMA}, "vision_config": SIGLIP, "scale_factor": 2},
        {"image_processor_type": "SmolVLMImageProcessor", **SPLIT},
        {"image_seq_len": 4},
    ),
    "idefics3": (
        "idefics",
        {"text_config": {**TEXT, **LLAMA}, "vision_config": SIGLIP, "scale_factor": 2},
        {"image_processor_type": "Idefics3ImageProcessor", **SPLIT},
        {"image_seq_len": 4},
    ),
    "internvl": (
        "internvl",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_seq_length": 4,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "min_patches": 1,
            "max_patches": 4,
        },
        {"image_seq_length": 4},
    ),
}


def picture_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character that has the special tokens of a family."""
    placeholder, named, others = PLACES[kind]
    rows = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)] if kind == "idefics" else []
    tokens = [*CHARACTERS, "\n", "<pad>", "<end>"]
    tokenizer = Tokenizer(WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    fast.add_tokens([*others, *rows], special_tokens=True)
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}<end>"
        "{% elif m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + placeholder + "{% else %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    return fast


def save_vision_model(folder: Path, model_type: str, scale: float = 4.0, **text: Any) -> Path:
    """Write a random model, its tokenizer and its processor's files; `text` changes its blocks.

    With `scale` 1 its weights are those from which training starts; larger ones make log-probs
    depend on every part.
    """
    kind, settings, image_processor, processor = FAMILIES[model_type]
    tokenizer = picture_tokenizer(kind)
    settings = settings | {"text_config": {**settings["text_config"], **text}}
    settings["text_config"] |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(model_type, **settings)
    image_token = "context_image_token" if kind == "internvl" else "image_token"
    names = {"image_token_id": image_token, "video_token_id": "video_token"}
    names |= {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token"}
    for name, token in names.items():
        if hasattr(config, name) and hasattr(tokenizer, token):
            setattr(config, name, tokenizer.convert_tokens_to_ids(getattr(tokenizer, token)))
    if model_type.startswith("qwen"):
        config.vision_start_token_id = tokenizer.convert_tokens_to_ids("<|vision_start|>")
        config.vision_end_token_id = tokenizer.convert_tokens_to_ids("<|vision_end|>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(scale)
                if scale > 1 and not parameter.any():
                    parameter.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def square(color: str, width: int = 32, height: int = 32, count: int = 1) -> Picture:
    """Return a picture of `count` squares of one color, side by side on white."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    side = width // count
    for i in range(count):
        draw.rectangle((i * side + 2, 2, (i + 1) * side - 3, height - 3), fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(file.getvalue())


def load_vision_model(folder: Path, model_type: str, device: str = "cpu") -> Loaded:
    """Write a model and load it in float32."""
    save_vision_model(folder, model_type)
    config = ModelConfig(path=str(folder), device=device, dtype="float32")
    return load(config, torch.device(device))


def requests_with_pictures(loaded: Loaded) -> list[Request]:
    """Return requests with one, two and no pictures; two have equal ids and other pictures."""
    rows = picture_rows(vision_of(loaded.model).processor, loaded.tokenizer).trajectories()
    prompts = dict.fromkeys((tuple(row.prompt), row.images) for row in rows)
    return [Request(list(prompt), [1, 2, 3], images=images) for prompt, images in prompts]
