"""Views: which policy inside a model is meant, the full model or the one after some blocks.

A view below the top calls the stock transformers blocks one by one (embed, rotary, blocks[:n]);
the blocks above do not run. The internal policy is softmax(head(hidden) / temperature) without
the final norm; norm="final" applies the final norm (the logit lens).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from postgrad.errors import Unsupported, WrongValue
from postgrad.model.passes.sequence import AnyPacking
from postgrad.model.passes.support import has_window, vision_of
from postgrad.model.port import FULL, View, after

if TYPE_CHECKING:
    from postgrad.model.passes.layout import MicroBatch
    from postgrad.model.vision import PlacedPictures

# Cosines and sines (batch, length, head_dim) by kind; see rotary_kinds.
Rotary = dict[str, tuple[Tensor, Tensor]]
REQUIRED_CHILDREN = ("embed_tokens", "layers", "rotary_emb")
FINAL_NORMS = ("norm", "final_layernorm")  # names of the final norm; the second is that of Phi


def hidden_states(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    view: View,
    packing: AnyPacking | None = None,
    stock: bool = False,
    pictures: "PlacedPictures | None" = None,
) -> Tensor:
    """Return the (batch, length, width) states of the viewed policy that the head reads.

    `mask` is a boolean (batch, 1, length, length) attention mask, or None for causal order. For
    one row of packed tokens a `packing` replaces the mask. `stock` runs the model's own forward
    pass with its own masks; each row then holds one trajectory, padded on the right. With
    `pictures` the language model gets embeddings in place of ids.
    """
    decoder: Any = model.base_model
    inputs: dict[str, Any] = {"input_ids": ids}
    if pictures is not None:
        decoder = decoder_of(model)
        inputs = vision_of(model).language_inputs(model, ids, pictures)
    if stock and view.num_blocks is None:
        return decoder(**inputs, use_cache=False).last_hidden_state
    if packing is not None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    elif mask is None:
        mask = _causal_mask(ids)
    # transformers passes a boolean 4-D mask on unchanged, so every architecture sees the same one.
    if view.num_blocks is None:
        return decoder(
            **{"position_ids": positions, **inputs},
            attention_mask=mask,
            use_cache=False,
            **_packing_argument(packing),
            **_window_argument(model, positions),
        ).last_hidden_state
    if pictures is None:
        hidden, rotary = embed(model, ids, positions)
    else:
        hidden = inputs["inputs_embeds"]
        rotary = rotary_values(model, hidden, inputs.get("position_ids", positions))
    deep = inputs.get("deepstack_visual_embeds", ())
    places = inputs.get("visual_pos_masks")
    return run_blocks(model, hidden, rotary, view, packing, mask, positions, deep, places)


def pass_states(model: nn.Module, micro: "MicroBatch", view: View = FULL) -> Tensor:
    """Return hidden_states of one laid-out pass."""
    layout = (micro.ids, micro.positions, micro.mask, view, micro.packing, micro.stock)
    return hidden_states(model, *layout, micro.pictures)


def embed(model: nn.Module, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotary]:
    """Return the inputs of the blocks: token embeddings, rotary cosines and sines."""
    hidden = decoder_of(model).embed_tokens(ids)
    return hidden, rotary_values(model, hidden, positions)


def rotary_values(model: nn.Module, like: Tensor, positions: Tensor) -> Rotary:
    """Return the rotary cosines and sines of the positions, by kind, in the type of `like`.

    Positions beside pictures are (4, batch, length): those in the row, then those on three axes.
    """
    decoder = decoder_of(model)
    if positions.dim() == 3:
        positions = positions[1:]
    elif hasattr(decoder.rotary_emb, "mrope_section"):  # text is at one place of three axes
        positions = positions.expand(3, *positions.shape)
    values: Rotary = {}
    for kind in dict.fromkeys(rotary_kinds(model)):
        layer_type = {"layer_type": kind} if kind else {}
        values[kind] = decoder.rotary_emb(like, position_ids=positions, **layer_type)
    return values


def rotary_kinds(model: nn.Module) -> list[str]:
    """Return the kind of rotary positions of each block: its layer type, or "" if all are equal."""
    decoder = decoder_of(model)
    if isinstance(getattr(decoder.rotary_emb, "rope_type", None), dict):
        return list(decoder.config.layer_types)
    return [""] * len(decoder.layers)


def run_blocks(
    model: nn.Module,
    hidden: Tensor,
    rotary: Rotary,
    view: View,
    packing: AnyPacking | None = None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    deep: Sequence[Tensor] = (),
    places: Tensor | None = None,
) -> Tensor:
    """Return the viewed policy's states: the blocks, then the final norm where the view has it.

    `deep` are features of pictures, which are added to the states at `places` after the first
    blocks.
    """
    blocks = check_view(model, view)
    kinds = rotary_kinds(model)
    for number, (block, kind) in enumerate(zip(blocks[: view.num_blocks], kinds, strict=False)):
        hidden = block(
            hidden,
            attention_mask=mask,
            position_embeddings=rotary[kind],
            position_ids=positions,
            use_cache=False,
            **_packing_argument(packing),
            **_window_argument(model, positions),
        )
        if number < len(deep):
            hidden = decoder_of(model)._deepstack_process(hidden, places, deep[number])
    return final_norm(model)(hidden) if _has_final_norm(view, len(blocks)) else hidden


def unused_parameters(model: nn.Module, view: View) -> list[nn.Parameter]:
    """Return the parameters the viewed policy does not use: blocks above it and the final norm."""
    if view.num_blocks is None:
        return []
    blocks = check_view(model, view)
    unused: list[nn.Module] = list(blocks[view.num_blocks :])
    if not _has_final_norm(view, len(blocks)):
        unused.append(final_norm(model))
    return [p for module in unused for p in module.parameters()]


def _has_final_norm(view: View, num_blocks: int) -> bool:
    is_full = view.num_blocks is None or view.num_blocks == num_blocks
    return is_full or view.norm == "final"


def decoder_of(model: Any) -> Any:
    """Return the language model below the head, which is a part of a model that reads pictures."""
    return model.get_decoder()


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a language model: the modules of its longest ModuleList."""
    models = [module for module in model.modules() if hasattr(module, "get_decoder")]
    longest: list[nn.Module] = []
    for module in (decoder_of(models[0]) if models else model).modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


def final_norm(model: nn.Module) -> nn.Module:
    """Return the norm after the last block. Raises ConfigError if it has no known name."""
    for name, child in decoder_of(model).named_children():
        if name in FINAL_NORMS:
            return child
    raise Unsupported(
        f"model.path: {type(model).__name__} has no final norm of the name "
        f"{' or '.join(FINAL_NORMS)}, which internal policies need"
    )


def check_view(model: nn.Module, view: View) -> nn.ModuleList:
    """Return the model's blocks.

    Raises: ConfigError if the model has another layout or the view's depth is out of range.
    """
    decoder = decoder_of(model)
    children = dict(decoder.named_children())
    missing = [name for name in REQUIRED_CHILDREN if name not in children]
    if missing:
        raise Unsupported(
            f"model.path: {type(model).__name__} has no {missing[0]}; internal policies need "
            f"{', '.join(REQUIRED_CHILDREN)}"
        )
    final_norm(model)
    blocks: nn.ModuleList = decoder.layers
    if view.num_blocks is not None and not 1 <= view.num_blocks <= len(blocks):
        raise WrongValue(
            f"num_blocks={view.num_blocks} is out of range; {type(model).__name__} has blocks "
            f"1..{len(blocks)}"
        )
    return blocks


@torch.no_grad()
def check_blocks(model: nn.Module, view: View) -> None:
    """Check that the blocks, called one by one, reproduce the model's own states.

    Raises: ConfigError if they do not, such as in a model that scales its embeddings.
    """
    blocks = check_view(model, view)
    name = type(model).__name__
    device = next(model.parameters()).device
    ids = torch.arange(1, 5, device=device)[None]
    positions = torch.arange(4, device=device)[None]
    expected = hidden_states(model, ids, positions, None, FULL)
    try:
        actual = hidden_states(model, ids, positions, None, after(len(blocks)))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise Unsupported(
            f"model.path: the blocks of {name} cannot be called one by one ({error}), so internal "
            "policies are not supported for it"
        ) from error
    difference = (actual.float() - expected.float()).abs().max().item()
    if not difference <= 1e-3 * max(1.0, expected.float().abs().max().item()):
        raise Unsupported(
            f"model.path: {name} transforms the states between its blocks (they differ by "
            f"{difference:.3g}), so internal policies are not supported for it"
        )


def _packing_argument(packing: AnyPacking | None) -> dict[str, Any]:
    return {} if packing is None else {"packing": packing}


def _window_argument(model: nn.Module, positions: Tensor | None) -> dict[str, Any]:
    return {"token_positions": positions} if has_window(model) else {}


def _causal_mask(ids: Tensor) -> Tensor:
    length = ids.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
