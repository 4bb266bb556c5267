"""CUDA graphs of packed passes: a forward or backward pass through the blocks is one launch each.

For small models a GPU waits for Python: launching a block's kernels one by one takes longer than
they run. A graph is captured for a fixed number of tokens. A pass is padded to that number with
tokens that attend only to themselves and that nothing reads, so they add no gradient. The graph
adds gradients to the optimizer's own buffers. Embedding, head and loss are outside of the graph.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.errors import RunError
from postgrad.model.device import capture_graphs, supports_graph_capture
from postgrad.model.lora import adapter_parameters
from postgrad.model.optimizers.gradient_sums import returned_gradients
from postgrad.model.passes.layout import MicroBatch, supports_packing
from postgrad.model.passes.packing import Packing, num_tiles, padding_tiles
from postgrad.model.passes.support import capture_problem
from postgrad.model.port import View
from postgrad.model.views import Rotary, embed, pass_states, run_blocks

# Operations of one block in one pass. Above it the device is busy anyway, and a graph would only
# hold memory.
MAX_BLOCK_OPERATIONS = 2e12
MAX_CAPTURED_PASSES = 16


class GraphCache:
    """The captured passes of one model. The least recently used one is evicted.

    All share one memory pool, so a pass must be finished, including its backward pass, before the
    next one begins. `masters` maps a parameter's id to the tensor in whose `.grad` its gradients
    accumulate. Without masters only passes without gradient are captured.
    """

    def __init__(self, model: Any, masters: dict[int, Tensor] | None = None) -> None:
        self.model = model
        self.masters = masters or {}
        self.enabled = supports_capture(model)
        self.parameters: list[Tensor] = []
        self.block_size = 0  # parameters per block
        if self.enabled:
            decoder = model.base_model
            self.parameters = [*decoder.layers.parameters(), *decoder.norm.parameters()]
            self.block_size = sum(p.numel() for p in decoder.layers[0].parameters())
        self.captured: dict[tuple[object, ...], CapturedPass] = {}
        self.gradient_buffers: dict[int, Tensor] = {}
        self.pool: Any = None
        self.num_passes = 0
        self.largest_pass = 0  # tokens, of the passes that run together

    def plan_passes(self, micros: list[MicroBatch]) -> list[MicroBatch]:
        """Return the passes of one update, of which all are captured or none.

        Captured passes hold their memory, and gradient buffers, during rollouts too. That is worth
        it where every pass is short, not for the short last pass of long ones.
        """
        self.largest_pass = max((micro.num_tokens for micro in micros), default=0)
        return micros

    def accepts(self, micro: MicroBatch) -> bool:
        """Return whether this pass can be captured and gains from it."""
        if not self.enabled or not isinstance(micro.packing, Packing):
            return False
        tokens = max(self.largest_pass, micro.num_tokens)
        if 6 * self.block_size * tokens > MAX_BLOCK_OPERATIONS:
            return False
        return bool(self.masters) or not torch.is_grad_enabled()

    def hidden_states(self, micro: MicroBatch, view: View) -> Tensor:
        """Return views.hidden_states of the pass, then padding. Valid until the next pass."""
        assert isinstance(micro.packing, Packing)
        captured = self.captured_pass(micro.num_tokens, len(micro.packing.query_tiles), view)
        hidden, rotary = embed(self.model, micro.ids, micro.positions)
        captured.copy_layout(rotary, micro.packing)
        self.num_passes += 1
        if torch.is_grad_enabled():
            return _ReplayedPass.apply(captured.anchor, hidden, captured, self)  # type: ignore[return-value]
        return captured.replay_forward(hidden)

    def captured_pass(self, tokens: int, tiles: int, view: View) -> "CapturedPass":
        """Return the captured pass for this size; capture it if there is none."""
        size = padded_size(tokens)
        max_tiles = 2 * num_tiles(size)
        while max_tiles < tiles + num_tiles(size - tokens):
            max_tiles *= 2
        trained = self.trained_parameters() if torch.is_grad_enabled() else None
        trained_ids = None if trained is None else tuple(map(id, trained))
        key = (size, max_tiles, view, trained_ids)
        captured = self.captured.pop(key, None)
        if captured is None:
            while len(self.captured) >= MAX_CAPTURED_PASSES:
                del self.captured[next(iter(self.captured))]
            captured = CapturedPass(self, size, max_tiles, view, trained)
        self.captured[key] = captured  # at the end: the most recently used
        return captured

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters of the blocks and the final norm that are trained now."""
        return [p for p in self.parameters if p.requires_grad and id(p) in self.masters]

    def gradient_buffer(self, p: Tensor) -> Tensor:
        """Return the float32 buffer of a parameter's gradient; its address never changes."""
        if id(p) not in self.gradient_buffers:
            self.gradient_buffers[id(p)] = torch.zeros_like(p, dtype=torch.float32)
        return self.gradient_buffers[id(p)]

    def attach_gradient_buffers(self, trained: list[Tensor]) -> None:
        """Make the buffers the masters' gradients; keep what other passes have added before."""
        to_clear: list[Tensor] = []
        for p in trained:
            master = self.masters[id(p)]
            buffer = self.gradient_buffer(p)
            if master.grad is buffer:
                continue
            if master.grad is None:
                to_clear.append(buffer)
            else:
                buffer.copy_(master.grad)
            master.grad = buffer
        if to_clear:
            torch._foreach_zero_(to_clear)


class CapturedPass:
    """The graphs of one pass size, with their input and output tensors.

    `trained` None: forward only.
    """

    def __init__(
        self,
        graph_cache: GraphCache,
        tokens: int,
        tiles: int,
        view: View,
        trained: list[Tensor] | None,
    ) -> None:
        model = graph_cache.model
        self.trained = trained or []
        device = next(model.parameters()).device
        zeros = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        with torch.no_grad():
            self.hidden, rotary = embed(model, zeros, zeros)
            self.rotary = {kind: (cos.clone(), sin.clone()) for kind, (cos, sin) in rotary.items()}
        self.packing = padding_tiles(0, tokens, tiles, device)
        # Gives the output a gradient function even if the embedding is frozen.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.grad_out = torch.zeros_like(self.hidden)
        self.grad_in = torch.zeros_like(self.hidden)
        self.out = self.hidden
        output: list[Tensor] = []  # holds the autograd graph between forward and backward

        def forward() -> None:
            output[:] = [run_blocks(model, self.hidden, self.rotary, view, self.packing)]
            self.out = output[0].detach()

        def backward() -> None:
            inputs = (self.hidden, *self.trained)
            # A view may end below the final norm, whose weight is then unused.
            grads = torch.autograd.grad(output.pop(), inputs, self.grad_out, allow_unused=True)
            self.grad_in.copy_(grads[0])
            for p, grad in zip(self.trained, grads[1:], strict=True):
                if grad is not None:  # zeros in the warm-up run before the capture
                    graph_cache.gradient_buffer(p).add_(grad)

        for p in self.trained:
            graph_cache.gradient_buffer(p)
        with_grad = trained is not None
        with torch.set_grad_enabled(with_grad):
            self.hidden.requires_grad_(with_grad)
            steps = [forward, backward] if with_grad else [forward]
            with returned_gradients():  # the graph has its own buffers
                self.graphs = capture_graphs(steps, graph_cache.pool)
        output.clear()
        graph_cache.pool = graph_cache.pool or self.graphs[0].pool()

    def copy_layout(self, rotary: Rotary, packing: Packing) -> None:
        """Copy the rotary values and tiles of a pass; the remaining tokens become padding."""
        tokens = len(packing.positions)
        size = len(self.packing.positions)
        for kind, values in rotary.items():
            for mine, new in zip(self.rotary[kind], values, strict=True):
                mine[:, :tokens].copy_(new)
        num_padding_tiles = len(self.packing.query_tiles) - len(packing.query_tiles)
        padding = padding_tiles(tokens, size, num_padding_tiles, self.hidden.device)
        torch.cat([packing.query_tiles, padding.query_tiles], out=self.packing.query_tiles)
        torch.cat([packing.key_tiles, padding.key_tiles], out=self.packing.key_tiles)
        torch.cat([packing.positions, padding.positions], out=self.packing.positions)

    @torch.no_grad()
    def replay_forward(self, hidden: Tensor) -> Tensor:
        """Return the states after the blocks; `hidden` (1, tokens, width) are the embeddings."""
        self.hidden[:, : hidden.shape[1]].copy_(hidden)
        self.graphs[0].replay()
        return self.out

    @torch.no_grad()
    def replay_backward(self, grad: Tensor) -> Tensor:
        """Add the parameters' gradients to their buffers; return that of the embeddings."""
        self.grad_out.copy_(grad)
        self.graphs[1].replay()
        return self.grad_in


class _ReplayedPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden: Tensor, captured: CapturedPass, graph_cache: GraphCache
    ) -> Tensor:
        ctx.captured = captured
        ctx.graph_cache = graph_cache
        ctx.pass_number = graph_cache.num_passes
        ctx.tokens = hidden.shape[1]
        return captured.replay_forward(hidden).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.pass_number != ctx.graph_cache.num_passes:
            raise RunError(
                "backward of a captured pass was called after the next forward pass; "
                "finish each pass with backward before the next one begins"
            )
        ctx.graph_cache.attach_gradient_buffers(ctx.captured.trained)
        return None, ctx.captured.replay_backward(grads[0])[:, : ctx.tokens], None, None


def compute_hidden_states(
    model: Any, micro: MicroBatch, view: View, graph_cache: GraphCache
) -> Tensor:
    """Return the (bundles, length, width) states that the head reads.

    They come from a captured graph where the pass supports it.
    """
    if graph_cache.accepts(micro):
        return graph_cache.hidden_states(micro, view)
    return pass_states(model, micro, view)


def supports_capture(model: Any) -> bool:
    """Return whether the model's passes can be captured."""
    return not uncaptured_reason(model)


def uncaptured_reason(model: Any) -> str:
    """Return why the model's passes cannot be captured; empty when they can.

    A graph needs kernels that never wait for the host, and weights with fixed addresses. These
    are refused: sharded parameters, which FSDP gathers and frees; adapters, which are switched on
    and off between passes; activation checkpointing, which reads the host's random state.
    """
    parameters = list(model.parameters())
    is_sharded = hasattr(parameters[0], "placements")
    if not supports_graph_capture(parameters[0].device):
        return f"{parameters[0].device.type} has no graphs"
    if is_sharded:
        return "the parameters are sharded"
    if not supports_packing(model):
        return "the passes are not packed"
    if problem := capture_problem(model):
        return problem
    if model.base_model is not model.get_decoder():
        return f"{type(model).__name__} is more than a text model"
    if adapter_parameters(model):
        return "LoRA adapters are switched on and off between passes"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "activation checkpointing reads the host's random state"
    return ""


def padded_size(tokens: int) -> int:
    """Return the pass size to capture: powers of two up to 4,096, then eighths of the power above.

    There are few sizes, because capturing a new one takes as long as computing 70,000 tokens.
    """
    power = 1 << (tokens - 1).bit_length()
    if power <= 4096:
        return max(256, power)
    step = power // 8
    return -(-tokens // step) * step
