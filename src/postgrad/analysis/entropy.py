"""Entropy of the policies inside a model: after each block, and of what its attention and its FFN write (BuPO's analysis).

Every state goes through the model's own head. With H the states between blocks, A and F what attention and FFN add to them:

    layer:      H^l                      against H^(l-1), neither of them normed
    attention:  A^l, not normed          against the block's own input norm of H^(l-1)
    ffn:        F^l, not normed          against the block's own second norm of H^(l-1) + A^l

A change is the entropy of the output minus that of the input, at each position that predicts a response token, the first one included.
Hooks on the stock blocks turn states into entropies while the model runs; no states are kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from postgrad.errors import ConfigError
from postgrad.model.passes.head import upcast_logits
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.views import FULL, after, check_view, hidden_states
from postgrad.types import Batch

TOKEN_CHUNK, HEAD_CHUNK = 512, 1 << 15  # logits held at once: 64 MiB in float32
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def state_entropy(
    hidden: Tensor, weight: Tensor, token_chunk: int = TOKEN_CHUNK, head_chunk: int = HEAD_CHUNK
) -> Tensor:
    """(tokens,) entropy in nats of softmax(hidden @ weight.T), float32; hidden (tokens, width), weight (vocabulary, width).

    The logits exist in pieces of token_chunk x head_chunk. Per token are kept the largest logit so far m, the sum s of exp(z - m) and the
    sum t of (z - m) exp(z - m); the entropy is log s - t / s. No large numbers are subtracted, so un-normed states lose no digits.
    """
    return torch.cat(
        [_rows_entropy(part, weight, head_chunk) for part in hidden.split(token_chunk)]
    ).clamp(min=0.0)


def _rows_entropy(hidden: Tensor, weight: Tensor, head_chunk: int) -> Tensor:
    top = s = t = torch.zeros(len(hidden), device=hidden.device)
    for number, rows in enumerate(weight.split(head_chunk)):
        logits = upcast_logits(hidden, rows)
        high = logits.amax(-1)
        if number:
            high = torch.maximum(high, top)
            shift = top - high
            s, t = s * shift.exp(), (t + s * shift) * shift.exp()
        logits -= high[:, None]
        weights = logits.exp()
        s, t, top = s + weights.sum(-1), t + (weights * logits).sum(-1), high
    return s.log() - t / s


def measure(
    model: Any, batch: Batch, token_budget: int, told: Callable[[int], None] = lambda tokens: None
) -> dict[str, Tensor]:
    """Entropies of every policy at every response token of the batch, (tokens,) each and all in one order.

    Keys: `full` (the whole model's own policy), `layer/0` (the embedding) .. `layer/L` (before the final norm), and for l in 1..L
    `attention_in/l`, `attention_out/l`, `ffn_in/l`, `ffn_out/l`. `told` hears how many tokens each pass did.
    """
    probe = Probe(model)
    device, width = next(model.parameters()).device, int(model.config.get_text_config().hidden_size)
    with torch.no_grad(), probe.hooked():
        for micro in make_padded_micro_batches(batch, token_budget, width):
            micro = micro.to(device)
            probe.gather = micro.gather
            probe.take("full", hidden_states(model, micro.ids, micro.positions, micro.mask, FULL))
            told(len(micro.gather))
    return {name: torch.cat(parts) for name, parts in probe.found.items()}


class Probe:
    """Hooks that turn the states of the stock blocks into entropies at the positions `gather`."""

    def __init__(self, model: Any) -> None:
        self.model, self.blocks = model, check_view(model, after(1))
        missing = [part for part in PARTS if part not in dict(self.blocks[0].named_children())]
        if missing:
            raise ConfigError(
                f"the blocks of {type(model).__name__} have no {missing[0]}; this analysis needs {', '.join(PARTS)}"
            )
        self.weight: Tensor = model.get_output_embeddings().weight
        self.found: dict[str, list[Tensor]] = {}
        self.gather = torch.zeros(0, dtype=torch.int64)
        self.held: dict[str, Tensor] = {}

    def take(self, name: str, states: Tensor) -> Tensor:
        """Note the entropy of the states that predict response tokens; returns those states."""
        picked = states.flatten(0, 1)[self.gather]
        self.found.setdefault(name, []).append(state_entropy(picked, self.weight).cpu())
        return picked

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = [
            hook
            for number, block in enumerate(self.blocks, 1)
            for hook in self._hooks(number, block)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, number: int, block: nn.Module) -> Iterator[Any]:
        parts = dict(block.named_children())
        names = {
            "input_layernorm": "attention_in",
            "self_attn": "attention_out",
            "post_attention_layernorm": "ffn_in",
            "mlp": "ffn_out",
        }
        yield block.register_forward_pre_hook(lambda _, args: self._begin(number, args[0]))
        for part, name in names.items():
            yield parts[part].register_forward_hook(
                lambda _, __, out, name=name: self._inside(number, name, out)
            )
        yield block.register_forward_hook(lambda *got: self._end(number, got[-1]))

    def _begin(self, number: int, states: Tensor) -> None:
        self.held = {
            "sum": self.take("layer/0", states)
            if number == 1
            else states.flatten(0, 1)[self.gather]
        }

    def _inside(self, number: int, name: str, out: Any) -> None:
        picked = self.take(f"{name}/{number}", out[0] if isinstance(out, tuple) else out)
        if name.endswith("_out"):
            self.held["sum"] = self.held["sum"] + picked

    def _end(self, number: int, states: Any) -> None:
        """H^l must be H^(l-1) + A^l + F^l; a model that norms or scales in between has other modules than the ones measured."""
        picked = self.take(f"layer/{number}", states)
        gap, scale = (
            (picked - self.held["sum"]).abs().max().item(),
            max(1.0, picked.abs().max().item()),
        )
        if not gap <= (2e-2 if picked.dtype == torch.bfloat16 else 1e-3) * scale:
            name = type(self.model).__name__
            raise ConfigError(
                f"{name}: block {number} does more than add attention and FFN to its input (gap {gap:.3g}); it cannot be analyzed"
            )


def summarize(found: dict[str, Tensor], tolerance: float) -> dict[str, Any]:
    """Per layer (from 1) and module mean, std, min, max and median of input, output and change; the full policy's; the boundary layer."""
    num_layers = max(int(name.split("/")[1]) for name in found if name.startswith("layer/"))
    layers = []
    for number in range(1, num_layers + 1):
        pairs = {
            "attention": (found[f"attention_in/{number}"], found[f"attention_out/{number}"]),
            "ffn": (found[f"ffn_in/{number}"], found[f"ffn_out/{number}"]),
            "layer": (found[f"layer/{number - 1}"], found[f"layer/{number}"]),
        }
        told = {
            name: {"input": stats(a), "output": stats(b), "change": stats(b - a)}
            for name, (a, b) in pairs.items()
        }
        layers.append({"number": number, **told})
    changes = [layer["ffn"]["change"]["mean"] for layer in layers]
    try:
        boundary: int | None = boundary_layer(changes, tolerance)
    except ConfigError:
        boundary = None
    return {
        "tokens": len(found["full"]),
        "num_layers": num_layers,
        "boundary_layer": boundary,
        "boundary_threshold": tolerance * max(map(abs, changes)),
        "full_policy": stats(found["full"]),
        "layers": layers,
    }


def stats(values: Tensor) -> dict[str, float]:
    array = values.double().numpy()
    return {
        name: float(f(array))
        for name, f in (
            ("mean", np.mean),
            ("std", np.std),
            ("min", np.min),
            ("max", np.max),
            ("median", np.median),
        )
    }


def boundary_layer(changes: Sequence[float], tolerance: float = 0.05) -> int:
    """The last layer (from 1) whose FFN still explores: its entropy change is above `tolerance` of the largest change of all.

    Raises:
        ConfigError: no layer's is.
    """
    threshold = tolerance * max(map(abs, changes))
    above = [
        number
        for number, change in enumerate(changes, 1)
        if change > threshold and not math.isnan(change)
    ]
    if not above:
        raise ConfigError(
            f"no layer's FFN raises the entropy by more than {threshold:.3g} nats, so there is no boundary layer"
        )
    return above[-1]
