"""Packed passes recorded once and played again: the blocks of a forward or backward pass become one launch each.

Small models leave a GPU waiting for Python: launching a block's kernels one by one takes longer than they run. A recording is made for a
number of tokens; a pass is padded to it with tokens that see only themselves and that nothing reads, so no gradient comes from them.
Gradients are added to the optimizer's own sums inside the recording. Embedding, head and loss stay outside.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.errors import RunError
from postgrad.model.device import capture_graphs, supports_graph_capture
from postgrad.model.lora import adapter_parameters
from postgrad.model.passes.layout import MicroBatch, supports_packing
from postgrad.model.passes.packing import Packing, num_tiles, padding_tiles
from postgrad.model.views import View, embed, hidden_states, run_blocks

MOST_WORK = 2e12  # operations of one block in a pass; above it the device is busy anyway, and its memory is better left free
MOST_RECORDINGS = 16


class GraphCache:
    """The recordings of one model's passes. They share their memory: a pass is finished, backward too, before the next one begins.

    `masters` are the tensors in whose `.grad` the parameters' gradients add up, by the parameter's id; without any, only passes
    without a gradient are recorded.
    """

    def __init__(self, model: Any, masters: dict[int, Tensor] | None = None) -> None:
        self.model, self.masters = model, masters or {}
        self.usable = can_record(model)
        decoder = model.base_model
        self.parameters = (
            [*decoder.layers.parameters(), *decoder.norm.parameters()] if self.usable else []
        )
        self.block_size = (
            sum(p.numel() for p in decoder.layers[0].parameters()) if self.usable else 0
        )
        self.recordings: dict[tuple[object, ...], CapturedPass] = {}
        self.sums: dict[int, Tensor] = {}
        self.pool: Any = None
        self.serial = 0

    def takes(self, micro: MicroBatch) -> bool:
        """Whether this pass can be recorded and is worth it."""
        if (
            not self.usable
            or not isinstance(micro.packing, Packing)
            or 6 * self.block_size * micro.num_tokens > MOST_WORK
        ):
            return False
        return bool(self.masters) or not torch.is_grad_enabled()

    def states(self, micro: MicroBatch, view: View) -> Tensor:
        """What hidden_states gives, and rows of padding after it. It lasts until the next pass."""
        assert isinstance(micro.packing, Packing)
        recording = self.recording(micro.num_tokens, len(micro.packing.query_tiles), view)
        hidden, cos, sin = embed(self.model, micro.ids, micro.positions)
        recording.take(cos, sin, micro.packing)
        self.serial += 1
        if torch.is_grad_enabled():
            return _Played.apply(recording.anchor, hidden, recording, self)  # type: ignore[return-value]
        return recording.play(hidden)

    def recording(self, tokens: int, tiles: int, view: View) -> "CapturedPass":
        """The one for passes of this size, made where there is none yet; the one not used for longest goes when there are many."""
        size = rounded_up(tokens)
        room = 2 * num_tiles(size)
        while room < tiles + num_tiles(size - tokens):
            room *= 2
        trained = self.trained() if torch.is_grad_enabled() else None
        key = (size, room, view, None if trained is None else tuple(map(id, trained)))
        found = self.recordings.pop(key, None)
        if found is None:
            while len(self.recordings) >= MOST_RECORDINGS:
                del self.recordings[next(iter(self.recordings))]
            found = CapturedPass(self, size, room, view, trained)
        self.recordings[key] = found
        return found

    def trained(self) -> list[Tensor]:
        """The parameters of blocks and final norm that learn now."""
        return [p for p in self.parameters if p.requires_grad and id(p) in self.masters]

    def sum_of(self, p: Tensor) -> Tensor:
        """Where a parameter's gradients add up, in float32, at the same place for good."""
        if id(p) not in self.sums:
            self.sums[id(p)] = torch.zeros_like(p, dtype=torch.float32)
        return self.sums[id(p)]

    def open_sums(self, trained: list[Tensor]) -> None:
        """Make the sums the masters' gradients, with what passes of other kinds have added before."""
        fresh: list[Tensor] = []
        for p in trained:
            master, total = self.masters[id(p)], self.sum_of(p)
            if master.grad is total:
                continue
            if master.grad is None:
                fresh.append(total)
            else:
                total.copy_(master.grad)
            master.grad = total
        if fresh:
            torch._foreach_zero_(fresh)  # pyright: ignore[reportPrivateImportUsage]


class CapturedPass:
    """A pass of one size: where its inputs and outputs lie, and what is played. `trained` None: forward only."""

    def __init__(
        self,
        graph_cache: GraphCache,
        tokens: int,
        tiles: int,
        view: View,
        trained: list[Tensor] | None,
    ) -> None:
        model, self.trained = graph_cache.model, trained or []
        nothing = torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
        with torch.no_grad():
            self.hidden, self.cos, self.sin = (x.clone() for x in embed(model, nothing, nothing))
        self.packing = padding_tiles(0, tokens, tiles, nothing.device)
        # The output needs a gradient, whether or not the embedding learns.
        self.anchor = torch.zeros((), device=nothing.device, requires_grad=True)
        self.grad_out, self.grad_in = torch.zeros_like(self.hidden), torch.zeros_like(self.hidden)
        self.out = self.hidden
        live: list[Tensor] = []  # with its graph, from a forward pass to its backward pass

        def forward() -> None:
            live[:] = [run_blocks(model, self.hidden, (self.cos, self.sin), view, self.packing)]
            self.out = live[0].detach()

        def backward() -> None:
            # Unused ones: a view may end below the final norm.
            grads = torch.autograd.grad(
                live.pop(), (self.hidden, *self.trained), self.grad_out, allow_unused=True
            )
            self.grad_in.copy_(grads[0])
            for p, grad in zip(self.trained, grads[1:], strict=True):
                if grad is not None:
                    graph_cache.sum_of(p).add_(
                        grad
                    )  # on the trial run before the recording these are zeros

        for p in self.trained:
            graph_cache.sum_of(p)
        with torch.set_grad_enabled(trained is not None):
            self.hidden.requires_grad_(trained is not None)
            self.graphs = capture_graphs(
                [forward] if trained is None else [forward, backward], graph_cache.pool
            )
        live.clear()
        graph_cache.pool = graph_cache.pool or self.graphs[0].pool()

    def take(self, cos: Tensor, sin: Tensor, packing: Packing) -> None:
        """The pass's positions and tiles; what is left over is padding."""
        tokens, size, tiles = cos.shape[1], self.cos.shape[1], len(packing.query_tiles)
        self.cos[:, :tokens].copy_(cos)
        self.sin[:, :tokens].copy_(sin)
        rest = padding_tiles(tokens, size, len(self.packing.query_tiles) - tiles, cos.device)
        torch.cat([packing.query_tiles, rest.query_tiles], out=self.packing.query_tiles)
        torch.cat([packing.key_tiles, rest.key_tiles], out=self.packing.key_tiles)

    @torch.no_grad()
    def play(self, hidden: Tensor) -> Tensor:
        self.hidden[:, : hidden.shape[1]].copy_(hidden)
        self.graphs[0].replay()
        return self.out

    @torch.no_grad()
    def replay(self, grad: Tensor) -> Tensor:
        self.grad_out.copy_(grad)
        self.graphs[1].replay()
        return self.grad_in


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden: Tensor, recording: CapturedPass, graph_cache: GraphCache
    ) -> Tensor:
        ctx.recording, ctx.graph_cache, ctx.serial, ctx.tokens = (
            recording,
            graph_cache,
            graph_cache.serial,
            hidden.shape[1],
        )
        return recording.play(hidden).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.serial != ctx.graph_cache.serial:
            raise RunError(
                "a backward pass came after another forward pass had begun; passes are made one after the other"
            )
        ctx.graph_cache.open_sums(ctx.recording.trained)
        return None, ctx.recording.replay(grads[0])[:, : ctx.tokens], None, None


def pass_states(model: Any, micro: MicroBatch, view: View, graph_cache: GraphCache) -> Tensor:
    """(bundles, length, width) states of a pass that the head reads: played from a recording where there can be one."""
    if graph_cache.takes(micro):
        return graph_cache.states(micro, view)
    return hidden_states(model, micro.ids, micro.positions, micro.mask, view, micro.packing)


def can_record(model: Any) -> bool:
    """Whether the model's passes can be recorded: kernels that need no host in between, and weights that stay where they are."""
    parameters = list(model.parameters())
    if (
        not supports_graph_capture(parameters[0].device)
        or not supports_packing(model)
        or hasattr(parameters[0], "placements")
    ):
        return False  # a parameter with placements is divided over several processes and comes and goes
    # Adapters are switched off and on between passes; recomputed activations ask the host for its random state.
    checkpoints = any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    return not checkpoints and not adapter_parameters(model)


def rounded_up(tokens: int) -> int:
    """Doublings up to 4,096, then steps of a quarter to an eighth: few sizes, because a new one takes as long as 70,000 tokens."""
    power = 1 << (tokens - 1).bit_length()
    if power <= 4096:
        return max(256, power)
    return -(-tokens // (power // 8)) * (power // 8)
