"""Models without weights: one rank reads a model, the others get only their shards of it.

The first rank loads the model into host memory. The other ranks build it on the meta device, which
holds shapes and no numbers. After sharding, the first rank sends each tensor to all; every rank
keeps its own shard and drops the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postgrad.config.schema import ModelConfig
from postgrad.errors import RunError
from postgrad.model.device import DTYPES
from postgrad.model.load.formats import Loaded, auto_class_of
from postgrad.model.load.load import disable_dropout, load_tokenizer, model_config
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.passes.attention import register_attention
from postgrad.model.passes.support import (
    Support,
    sees_pictures,
    set_attention,
    set_support,
    support_of,
    transform_of,
)

BUFFER = "buffer/"  # marks names of buffers


def load_on_meta(config: ModelConfig, seed: int = 0) -> Loaded:
    """Return the model that load() would return, without weights, and its tokenizer."""
    stock_config = model_config(config, seed)
    with torch.device("meta"):
        model = auto_class_of(stock_config).from_config(
            stock_config,
            dtype=DTYPES[config.dtype],
            trust_remote_code=config.trust_remote_code,
        )
    model.train()
    disable_dropout(model)
    register_attention()
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return Loaded(model, load_tokenizer(config, seed))


def load_on_ranks(
    ranks: Ranks, load_full: Callable[[], Loaded], load_empty: Callable[[], Loaded]
) -> Loaded:
    """Return the full model on the first rank, and one without weights on the others.

    A collective.
    """
    if ranks.is_first:
        loaded = load_full()
        ranks.broadcast_json(_describe(loaded.model))
        return loaded
    loaded = load_empty()
    _adapt(loaded, ranks.broadcast_json(None))
    return loaded


def _describe(model: Any) -> dict[str, Any]:
    """Return what a model without weights lacks.

    That is the types of its parameters, which are trained, how passes are run, and how pictures
    are seen, or why they are not.
    """
    support = support_of(model)
    types = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    vision: Any = vars(model).get("postgrad_vision")
    if sees_pictures(model):
        vision = {"trained": vision.trained, "passes": vision.passes}
    return {
        "passes": support.passes,
        "reasons": list(support.reasons),
        "rounding": list(support.rounding),
        "attention": model.config._attn_implementation,
        "types": types,
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "vision": vision,
    }


def _adapt(loaded: Loaded, described: dict[str, Any]) -> None:
    """Give a model without weights what `_describe` says of the first rank's model."""
    model = loaded.model
    parameters = dict(model.named_parameters())
    if differing := parameters.keys() ^ described["types"].keys():
        raise RunError(
            f"the ranks built different models: {min(differing)} is not in all of them; "
            "install the same versions of transformers and peft on all nodes"
        )
    for name, p in parameters.items():
        p.data = p.data.to(getattr(torch, described["types"][name]))
        p.requires_grad_(name not in described["frozen"])
    set_attention(model, described["attention"])
    reasons = tuple(described["reasons"])
    mean, largest = described["rounding"]
    support = Support(described["passes"], transform_of(model), reasons, (mean, largest))
    set_support(model, support)
    vision: Any = described["vision"]
    if vision is not None:
        from postgrad.model.vision import Vision
        from postgrad.picture_processor import PictureProcessor

        if isinstance(vision, dict):
            passes = vision["passes"]
            vision = Vision(model, PictureProcessor(loaded.tokenizer), vision["trained"])
            vision.passes = passes
        model.postgrad_vision = vision


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, as they are before sharding."""
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers()}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


@torch.no_grad()
def allocate_shards(root: nn.Module, before: dict[str, Tensor], ranks: Ranks) -> bool:
    """Give a sharded model without weights memory; return whether fill_shards() is needed.

    A collective.
    """
    is_on_meta = any(tensor.is_meta for tensor in before.values())
    if is_on_meta:
        kept = {name: p.clone() for name, p in root.named_parameters() if not p.is_meta}
        root.to_empty(device="cpu" if ranks.offload else ranks.device)
        for name, p in root.named_parameters():
            if name in kept:
                p.copy_(kept[name])
    return bool(ranks.all_reduce_max(int(is_on_meta)))


@torch.no_grad()
def fill_shards(model: nn.Module, before: dict[str, Tensor], ranks: Ranks) -> None:
    """Copy each rank's shards from the first rank's tensors. A collective.

    `before` are the tensors before sharding: numbers on the first rank, shapes on the others.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for name, tensor in before.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
        if ranks.is_first:
            full.copy_(tensor)
        dist.broadcast(full, src=0)
        if name.startswith(BUFFER):
            buffers[name.removeprefix(BUFFER)].copy_(full)
        else:
            p: Any = parameters[name]
            p.to_local().copy_(ranks.local_shard(full, p))
