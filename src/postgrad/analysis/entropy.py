"""Entropy of the policies inside a model, as in BuPO's analysis.

The policies are those after each block, and those of the outputs of its attention and FFN.
Every state is multiplied by the model's own output head. H is the state between blocks, A and
F are the outputs of attention and FFN that the block adds to it:

    module      output             input
    layer       H^l                H^(l-1), without norm
    attention   A^l, without norm  H^(l-1) after the block's input norm
    ffn         F^l, without norm  H^(l-1) + A^l after the block's second norm

A change is the entropy of the output minus the entropy of the input, at each position that
predicts a response token, the first one included. Hooks on the stock blocks compute the
entropies during the forward pass, so no states are kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from postgrad import phases
from postgrad.errors import ConfigError, Unsupported
from postgrad.model.passes.head import Head, head_of, upcast_logits
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.port import FULL, after
from postgrad.model.views import check_view, hidden_states
from postgrad.types import Batch

# The logits of one chunk take 64 MiB in float32.
TOKEN_CHUNK = 512
HEAD_CHUNK = 1 << 15
# Submodule of a block -> name of its output in the results.
MODULES = {
    "input_layernorm": "attention_in",
    "self_attn": "attention_out",
    "post_attention_layernorm": "ffn_in",
    "mlp": "ffn_out",
}
# Largest relative difference between a block's output and input + attention + FFN.
MAX_GAP = {torch.bfloat16: 2e-2}
DEFAULT_MAX_GAP = 1e-3


def state_entropy(
    hidden: Tensor,
    weight: Tensor,
    token_chunk: int = TOKEN_CHUNK,
    head_chunk: int = HEAD_CHUNK,
    bias: Tensor | None = None,
) -> Tensor:
    """Return (tokens,) entropies in nats of softmax(hidden @ weight.T + bias), float32.

    `hidden` is (tokens, width), `weight` (vocabulary, width), `bias` (vocabulary,). The logits are
    computed in pieces of token_chunk x head_chunk.
    """
    head = Head(weight, bias)
    parts = [_chunk_entropy(part, head, head_chunk) for part in hidden.split(token_chunk)]
    return torch.cat(parts).clamp(min=0.0)


def _chunk_entropy(hidden: Tensor, head: Head, head_chunk: int) -> Tensor:
    """Return the (tokens,) entropies, from an online softmax over pieces of the vocabulary.

    Per token it keeps the largest logit m so far, s = sum of exp(z - m) and
    t = sum of (z - m) exp(z - m). The entropy is log s - t / s. No large numbers are
    subtracted, so the result is accurate for states without norm too.
    """
    m = torch.zeros(len(hidden), device=hidden.device)
    s = torch.zeros_like(m)
    t = torch.zeros_like(m)
    for start in range(0, len(head.weight), head_chunk):
        part = slice(start, start + head_chunk)
        bias = None if head.bias is None else head.bias[part]
        logits = upcast_logits(hidden, head.weight[part], bias)
        new_m = logits.amax(-1)
        if start:
            new_m = torch.maximum(new_m, m)
            shift = m - new_m
            t = (t + s * shift) * shift.exp()
            s = s * shift.exp()
        logits -= new_m[:, None]
        weights = logits.exp()
        s = s + weights.sum(-1)
        t = t + (weights * logits).sum(-1)
        m = new_m
    return s.log() - t / s


def measure(model: Any, batch: Batch, token_budget: int) -> dict[str, Tensor]:
    """Return the entropies of every internal policy at every response token of the batch.

    Each value is (tokens,); all have the same order of tokens. The keys are `full` (the model's
    policy), `layer/0` (the embedding) to `layer/L` (before the final norm), and for l in 1..L
    `attention_in/l`, `attention_out/l`, `ffn_in/l`, `ffn_out/l`.
    """
    probe = EntropyProbe(model)
    device = next(model.parameters()).device
    width = int(model.config.get_text_config().hidden_size)
    num_done, num_blocks = 0, len(probe.blocks)
    with torch.no_grad(), probe.hooked():
        for micro in make_padded_micro_batches(batch, token_budget, width):
            micro = micro.to(device)
            probe.gather = micro.gather
            num_tokens = len(micro.gather)
            probe.on_block = lambda number, before=num_done, new=num_tokens: phases.count(
                before + new * number // num_blocks, batch.num_tokens
            )
            states = hidden_states(model, micro.ids, micro.positions, micro.mask, FULL)
            probe.record("full", states)
            num_done += num_tokens
    return {name: torch.cat(parts) for name, parts in probe.entropies.items()}


class EntropyProbe:
    """Hooks that compute entropies of the states inside a model's stock blocks.

    `gather` are the flat positions that predict response tokens; set it before each pass.
    `on_block` is called with the number of each block that is done.

    Raises: ConfigError for a model whose blocks do not have the expected submodules.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blocks = check_view(model, after(1))
        submodules = dict(self.blocks[0].named_children())
        missing = [name for name in MODULES if name not in submodules]
        if missing:
            raise Unsupported(
                f"the blocks of {type(model).__name__} have no {missing[0]}; "
                f"this analysis needs {', '.join(MODULES)}",
                at="model",
            )
        self.head = head_of(model)
        self.entropies: dict[str, list[Tensor]] = {}
        self.gather = torch.zeros(0, dtype=torch.int64)
        self.on_block: Callable[[int], None] = lambda number: None
        self._residual = torch.zeros(0)  # block input + module outputs so far, (tokens, width)

    def record(self, name: str, states: Tensor) -> Tensor:
        """Store the entropy of the (rows, positions, width) states; return those at `gather`."""
        selected = self._select(states)
        entropy = state_entropy(selected, self.head.weight, bias=self.head.bias)
        self.entropies.setdefault(name, []).append(entropy.cpu())
        return selected

    def _select(self, states: Tensor) -> Tensor:
        return states.flatten(0, 1)[self.gather]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Installs the hooks for the duration of the block."""
        hooks: list[Any] = []
        for number, block in enumerate(self.blocks, 1):
            hooks += self._install_hooks(number, block)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _install_hooks(self, number: int, block: nn.Module) -> Iterator[Any]:
        submodules = dict(block.named_children())
        yield block.register_forward_pre_hook(
            lambda _, inputs: self._on_block_input(number, inputs[0])
        )
        for submodule, name in MODULES.items():
            yield submodules[submodule].register_forward_hook(
                lambda _, __, output, name=name: self._on_module_output(number, name, output)
            )
        yield block.register_forward_hook(
            lambda _, __, output: self._on_block_output(number, output)
        )

    def _on_block_input(self, number: int, states: Tensor) -> None:
        if number == 1:
            self._residual = self.record("layer/0", states)
        else:
            self._residual = self._select(states)

    def _on_module_output(self, number: int, name: str, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        selected = self.record(f"{name}/{number}", states)
        if name.endswith("_out"):
            self._residual = self._residual + selected

    def _on_block_output(self, number: int, states: Any) -> None:
        """Record the block's output; refuse a block that is not H^l = H^(l-1) + A^l + F^l.

        A model that norms or scales the outputs of its modules adds other values than measured.
        """
        selected = self.record(f"layer/{number}", states)
        gap = (selected - self._residual).abs().max().item()
        scale = max(1.0, selected.abs().max().item())
        if not gap <= MAX_GAP.get(selected.dtype, DEFAULT_MAX_GAP) * scale:
            raise Unsupported(
                f"{type(self.model).__name__}: block {number} does more than add attention and FFN "
                f"to its input (difference {gap:.3g}); this analysis does not support it",
                at="model",
            )
        self.on_block(number)


def summarize(entropies: dict[str, Tensor], tolerance: float) -> dict[str, Any]:
    """Return statistics per layer (from 1) and module, of the full policy, and the boundary layer.

    Each module has mean, std, min, max and median of input, output and change. The boundary
    layer is None if no layer's FFN raises the entropy.
    """
    num_layers = max(int(name.split("/")[1]) for name in entropies if name.startswith("layer/"))
    layers: list[dict[str, Any]] = []
    for number in range(1, num_layers + 1):
        layers.append(
            {
                "number": number,
                "attention": _module_stats(
                    entropies[f"attention_in/{number}"], entropies[f"attention_out/{number}"]
                ),
                "ffn": _module_stats(entropies[f"ffn_in/{number}"], entropies[f"ffn_out/{number}"]),
                "layer": _module_stats(
                    entropies[f"layer/{number - 1}"], entropies[f"layer/{number}"]
                ),
            }
        )
    ffn_changes = [layer["ffn"]["change"]["mean"] for layer in layers]
    try:
        boundary: int | None = boundary_layer(ffn_changes, tolerance)
    except ConfigError:  # no layer raises the entropy; the report says so
        boundary = None
    return {
        "tokens": len(entropies["full"]),
        "num_layers": num_layers,
        "boundary_layer": boundary,
        "boundary_threshold": tolerance * max(map(abs, ffn_changes)),
        "full_policy": stats(entropies["full"]),
        "layers": layers,
    }


def _module_stats(inputs: Tensor, outputs: Tensor) -> dict[str, dict[str, float]]:
    return {"input": stats(inputs), "output": stats(outputs), "change": stats(outputs - inputs)}


def stats(values: Tensor) -> dict[str, float]:
    """Return mean, population std, min, max and median."""
    array = values.double().numpy()
    return {
        "mean": float(np.mean(array)),
        "std": float(np.std(array)),
        "min": float(np.min(array)),
        "max": float(np.max(array)),
        "median": float(np.median(array)),
    }


def boundary_layer(changes: Sequence[float], tolerance: float = 0.05) -> int:
    """Return the last layer (from 1) whose FFN raises the entropy, given the mean FFN changes.

    A change counts if it is above `tolerance` times the largest absolute change.

    Raises:
        ConfigError: no change is above that threshold.
    """
    threshold = tolerance * max(map(abs, changes))
    boundary = 0
    for number, change in enumerate(changes, 1):
        if change > threshold and not math.isnan(change):
            boundary = number
    if not boundary:
        raise Unsupported(
            f"no layer's FFN raises the entropy by more than {threshold:.3g} nats, "
            "so there is no boundary layer"
        )
    return boundary


def internal_depth(boundary: int, num_layers: int) -> int:
    """Return the blocks of BuPO's internal policy: the boundary layer, never all blocks.

    After all of them the internal policy would be the full one without its last norm. Where even
    the last FFN raises the entropy, BuPO's authors take the block before it.
    """
    return max(1, min(boundary, num_layers - 1))
