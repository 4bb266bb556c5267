"""Activation checkpointing: block inputs in host memory, kept attention, and MLPs in chunks.

A checkpointed block keeps its input and recomputes the rest in the backward pass. For long rows
two things then fill the memory: the inputs of all blocks, and the wide activations of one MLP.
`offload_block_inputs` copies the inputs to page-locked host memory while the next block runs, and
brings each one back while the block above it is recomputed. `chunk_mlps` runs the MLP of a long
pass some tokens at a time. `keep_attention` spends memory to save time: recomputed blocks do not
compute their attention again. None changes what is computed; chunks change it by rounding.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from postgrad.model.device import device_module, supports_state_streaming
from postgrad.model.offload import allocate_pages, lock_pages_of
from postgrad.model.passes.attention_memo import attention_contexts

SEGMENT_BYTES = 32 << 20  # tensors are copied to host memory in segments of this size
SLAB_SEGMENTS = 16  # segments that are allocated and page-locked at once
MIN_BYTES = 1 << 20  # smaller tensors stay on the device
CHUNK_TOKENS = 8192  # of an MLP at a time


# ---- inputs of blocks in host memory


def offload_block_inputs(model: nn.Module, device: torch.device) -> None:
    """Let the checkpointed blocks of the model keep their inputs in host memory."""
    store = ActivationStore(device)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "gradient_checkpointing"):
            module._gradient_checkpointing_func = store.checkpoint


class ActivationStore:
    """Copies of activations in host memory, and the stream that copies them."""

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self.device_type = device.type
        self.min_bytes = min_bytes
        self.is_async = supports_state_streaming(device)
        self.streams: Any = device_module(device) if self.is_async else None
        self.copy_stream: Any = self.streams.Stream() if self.is_async else None
        self.free_segments: list[Tensor] = []
        self.num_segments = 0
        self.last: weakref.ref[_Stored] | None = None

    def checkpoint(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a block like torch's checkpoint, with its input tensors in host memory."""
        with saved_tensors_hooks(self.pack, self.unpack):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def pack(self, tensor: Tensor) -> "Tensor | _Stored":
        """Return a copy in host memory; small tensors and weights are returned as they are."""
        is_small = tensor.nbytes < max(self.min_bytes, 1)  # torch 2.11 also saves empty tensors
        if is_small or tensor.device.type != self.device_type or isinstance(tensor, nn.Parameter):
            return tensor
        stored = _Stored(self, tensor.detach().contiguous(), self.last)
        self.last = weakref.ref(stored)
        return stored

    def unpack(self, stored: "Tensor | _Stored") -> Tensor:
        """Return the tensor on its device, and start to copy the one that is needed next."""
        if isinstance(stored, Tensor):
            return stored
        tensor = stored.take()
        before = stored.previous() if stored.previous is not None else None
        if before is not None:
            before.prefetch()
        return tensor

    def take_segments(self, count: int) -> list[Tensor]:
        """Return unused segments of host memory; allocate more if there are too few."""
        while len(self.free_segments) < count:
            slab = allocate_pages(SLAB_SEGMENTS * SEGMENT_BYTES)
            if self.is_async:
                lock_pages_of(self, slab, "model.activation_offload=true")
            self.free_segments += slab.split(SEGMENT_BYTES)
            self.num_segments += SLAB_SEGMENTS
        taken = self.free_segments[-count:]
        del self.free_segments[-count:]
        return taken

    def copy(self, pairs: list[tuple[Tensor, Tensor]], device_tensor: Tensor) -> Any:
        """Copy (target, source) pairs; return an event that is reached afterwards.

        All copies run in order on one stream, so a segment may be reused at once.
        """
        if not self.is_async:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.copy_stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.copy_stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = self.streams.Event()
            event.record(self.copy_stream)
        device_tensor.record_stream(self.copy_stream)
        return event


class _Stored:
    """One tensor in segments of host memory, which are free again when it is deleted."""

    def __init__(
        self, store: ActivationStore, tensor: Tensor, previous: "weakref.ref[_Stored] | None"
    ) -> None:
        self.store = store
        self.segments: list[Tensor] = []
        self.previous = previous  # packed before this one, so needed after it
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.loaded: Tensor | None = None
        self.event: Any = None
        data = _as_bytes(tensor)
        self.segments = store.take_segments(-(-len(data) // SEGMENT_BYTES))
        store.copy(self._pairs(data, to_host=True), tensor)

    def _pairs(self, data: Tensor, to_host: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the (target, source) pairs that copy the tensor's bytes."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for part, segment in zip(data.split(SEGMENT_BYTES), self.segments, strict=True):
            host = segment[: len(part)]
            pairs.append((host, part) if to_host else (part, host))
        return pairs

    def prefetch(self) -> None:
        """Start the copy to the device, unless it has been started."""
        if self.loaded is None:
            self.loaded = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            pairs = self._pairs(_as_bytes(self.loaded), to_host=False)
            self.event = self.store.copy(pairs, self.loaded)

    def take(self) -> Tensor:
        """Return the tensor on the device; work that is launched later waits for the copy."""
        self.prefetch()
        tensor = self.loaded
        assert tensor is not None
        self.loaded = None
        if self.event is not None:
            self.store.streams.current_stream().wait_event(self.event)
        return tensor

    def __del__(self) -> None:
        self.store.free_segments += self.segments


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# ---- attention that is not computed again


def keep_attention(model: Any, num_blocks: int) -> None:
    """Let the last checkpointed blocks keep their attention outputs for the recomputation."""
    blocks = list(getattr(model.base_model, "layers", ()))
    for block in blocks[max(0, len(blocks) - num_blocks) :]:
        block._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, context_fn=attention_contexts
        )


# ---- MLPs in chunks


def chunk_mlps(model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Let the MLPs of the blocks compute long passes in chunks of tokens.

    Each chunk is recomputed in the backward pass. MLPs with experts are left as they are.
    """
    for block in getattr(model.base_model, "layers", ()):
        mlp = getattr(block, "mlp", None)
        if mlp is not None and hasattr(mlp, "down_proj"):
            mlp.forward = partial(_chunked_forward, mlp, mlp.forward, chunk_tokens)


def _chunked_forward(mlp: Any, forward: Any, chunk_tokens: int, hidden_states: Tensor) -> Tensor:
    """Return forward(hidden_states) of (batch, length, width), computed chunk by chunk."""
    tokens = hidden_states.flatten(0, -2)
    if len(tokens) <= chunk_tokens:
        return forward(hidden_states)
    if not torch.is_grad_enabled():
        return _run_chunks(forward, tokens, chunk_tokens).view(hidden_states.shape)
    if _has_dropout(mlp):  # torch's checkpoint draws the same random numbers again
        parts = [
            checkpoint(forward, chunk[None], use_reentrant=False)[0]  # type: ignore[index]
            for chunk in tokens.split(chunk_tokens)
        ]
        return torch.cat(parts).view(hidden_states.shape)
    parameters = [p for p in mlp.parameters() if p.requires_grad]
    if not parameters and not tokens.requires_grad:
        return _run_chunks(forward, tokens, chunk_tokens).view(hidden_states.shape)
    if not tokens.requires_grad:  # otherwise torch would not keep it
        tokens = tokens.detach().requires_grad_()
    # The input is kept before anything is computed. Where nothing after the MLP keeps a tensor,
    # the recomputation of the block ends here, and the MLP is computed again only in chunks.
    kept = _KeptInput()
    tokens = _KeepInput.apply(tokens, kept)
    out = _ChunkedMlp.apply(tokens, forward, chunk_tokens, kept, *parameters)
    return out.view(hidden_states.shape)  # type: ignore[union-attr]


def _has_dropout(mlp: nn.Module) -> bool:
    """Return whether the MLP, or an adapter in it, draws random numbers."""
    return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in mlp.modules())


def _run_chunks(forward: Any, tokens: Tensor, chunk_tokens: int) -> Tensor:
    return torch.cat([forward(chunk[None])[0] for chunk in tokens.split(chunk_tokens)])


class _KeptInput:
    """The context whose saved tensor is the input of an MLP."""

    context: Any = None


class _KeepInput(torch.autograd.Function):
    """Returns its input and saves it for another function's backward pass."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, kept: _KeptInput) -> Tensor:
        ctx.save_for_backward(tokens)
        kept.context = ctx
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None


class _ChunkedMlp(torch.autograd.Function):
    """Computes an MLP chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        forward: Any,
        chunk_tokens: int,
        kept: _KeptInput,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.forward, ctx.chunk_tokens, ctx.kept = forward, chunk_tokens, kept
        ctx.parameters = parameters
        return _run_chunks(forward, tokens, chunk_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (tokens,) = ctx.kept.context.saved_tensors
        grad_tokens: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        parts = zip(tokens.split(ctx.chunk_tokens), grads[0].split(ctx.chunk_tokens), strict=True)
        for chunk, grad in parts:
            chunk = chunk.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.forward(chunk[None])[0]
            inputs = [chunk, *ctx.parameters]
            first, *others = torch.autograd.grad(out, inputs, grad, allow_unused=True)
            grad_tokens.append(first)
            for i, other in enumerate(others):  # None where a product added it
                before = sums[i]
                if other is not None:
                    sums[i] = other if before is None else before + other
        return torch.cat(grad_tokens), None, None, None, *sums
