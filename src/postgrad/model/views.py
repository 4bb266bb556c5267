"""Views: which policy inside a model is meant, the whole model or the one after some of its blocks.

The stock transformers blocks are called one by one, embed, rotary, blocks[:num_blocks]; the blocks above do not run.
The internal policy is softmax(hidden @ head / temperature) with no final norm (norm="final" gives the logit lens instead).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.errors import ConfigError
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.row_attention import Spread


@dataclass(frozen=True)
class View:
    """`num_blocks` None is the full policy; n is the policy after the first n blocks (1-based count, so 1..L)."""

    num_blocks: int | None = None
    norm: str = "none"


FULL = View()


def after(num_blocks: int, norm: str = "none") -> View:
    """The internal policy after `num_blocks` blocks."""
    return View(num_blocks, norm)


def hidden_states(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    view: View,
    packing: Packing | Spread | None = None,
) -> Tensor:
    """(batch, length, width) states that the head reads, of the viewed policy.

    `mask` is a boolean (batch, 1, length, length) of who may look at whom, or None for plain causal order. A `packing` says it instead
    for one row of packed tokens.
    """
    extra: dict[str, Any] = {"packing": packing} if packing is not None else {}
    # Always a boolean 4-D mask: it passes through transformers untouched, so every architecture sees the same rule.
    causal = (
        torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        if packing is not None
        else _mask_or_causal(mask, ids)
    )
    decoder: Any = model.base_model
    if view.num_blocks is None:
        return decoder(
            input_ids=ids, position_ids=positions, attention_mask=causal, use_cache=False, **extra
        ).last_hidden_state
    hidden, *rotary = embed(model, ids, positions)
    return run_blocks(model, hidden, tuple(rotary), view, packing, causal, positions)


def embed(model: nn.Module, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the blocks start from: the tokens' vectors, cosines and sines of their positions."""
    decoder: Any = model.base_model
    hidden = decoder.embed_tokens(ids)
    return hidden, *decoder.rotary_emb(hidden, position_ids=positions)


def run_blocks(
    model: nn.Module,
    hidden: Tensor,
    rotary: tuple[Tensor, ...],
    view: View,
    packing: Packing | Spread | None = None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The viewed policy's states: block after block, and the final norm where the view has it."""
    extra: dict[str, Any] = {"packing": packing} if packing is not None else {}
    decoder: Any = model.base_model
    blocks = check_view(model, view)
    for block in blocks[: view.num_blocks]:
        hidden = block(
            hidden,
            attention_mask=mask,
            position_embeddings=rotary,
            position_ids=positions,
            use_cache=False,
            **extra,
        )
    last = view.num_blocks in (None, len(blocks))  # the full policy always has its norm
    return decoder.norm(hidden) if last or view.norm == "final" else hidden


def unused_parameters(model: nn.Module, view: View) -> list[nn.Parameter]:
    """Parameters the viewed policy does not use: the blocks above it and the final norm."""
    if view.num_blocks is None:
        return []
    blocks = check_view(model, view)
    decoder: Any = model.base_model
    above = list(blocks[view.num_blocks :])
    if view.num_blocks < len(blocks) and view.norm != "final":
        above.append(decoder.norm)
    return [p for module in above for p in module.parameters()]


def check_view(model: nn.Module, view: View) -> nn.ModuleList:
    """The model's blocks; raises ConfigError when the model has another layout or the depth is out of range."""
    decoder: Any = model.base_model
    parts = dict(decoder.named_children())
    missing = [
        name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if name not in parts
    ]
    if missing:
        raise ConfigError(
            f"{type(model).__name__} has no {missing[0]}; internal policies need embed_tokens, layers, norm, rotary_emb"
        )
    blocks: nn.ModuleList = decoder.layers
    if view.num_blocks is not None and not 1 <= view.num_blocks <= len(blocks):
        raise ConfigError(
            f"num_blocks={view.num_blocks} is out of range; {type(model).__name__} has blocks 1..{len(blocks)}"
        )
    return blocks


@torch.no_grad()
def check_blocks(model: nn.Module, view: View) -> None:
    """Refuse a model whose blocks, called one by one, do not give its own states, such as one that scales its embeddings."""
    blocks = check_view(model, view)
    name, device = type(model).__name__, next(model.parameters()).device
    ids = torch.arange(1, 5, device=device)[None]
    positions = torch.arange(4, device=device)[None]
    whole = hidden_states(model, ids, positions, None, FULL)
    try:
        ours = hidden_states(model, ids, positions, None, after(len(blocks)))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"the blocks of {name} cannot be called one by one ({error}), so it has no internal policies here"
        ) from error
    gap = (ours.float() - whole.float()).abs().max().item()
    if not gap <= 1e-3 * max(1.0, whole.float().abs().max().item()):
        raise ConfigError(
            f"{name} does more between its blocks than pass the states on (gap {gap:.3g}), so it has no internal policies here"
        )


def _mask_or_causal(mask: Tensor | None, ids: Tensor) -> Tensor:
    if mask is not None:
        return mask
    length = ids.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
