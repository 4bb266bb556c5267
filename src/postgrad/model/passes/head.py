"""Log-probs and entropy of given tokens, in chunks over the LM head, without the full logits.

The forward pass keeps one log-sum-exp per token; the backward pass recomputes each chunk's logits.
Everything between the matrix products is float32. The weight's gradient accumulates in float32, so
the chunk size changes the result by rounding only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postgrad.model.device import (
    has_float32_accumulation,
    has_own_memory,
    is_simulated_gpu,
    supports_triton,
)
from postgrad.model.optimizers.gradient_sums import add_product, gradient_sums
from postgrad.model.parallel.groups import sum_gradients
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import NO_TRANSFORM, LogitTransform, support_of
from postgrad.model.passes.vocabulary import VocabularySlice, as_table, vocabulary_of
from postgrad.model.port import TokenOutputs

CACHE_ELEMENTS = 1 << 19  # 2 MiB in float32: what the cache of one CPU core holds
# Logits held at once: 64 MiB in float32, and 512 MiB on accelerators with their own memory.
CHUNK_ELEMENTS = 1 << 24
LARGE_CHUNK_ELEMENTS = 1 << 27


class Head(NamedTuple):
    """The LM head: weight (vocabulary, width) and bias (vocabulary,), which most models lack."""

    weight: Tensor
    bias: Tensor | None = None


def head_of(model: Any) -> Head:
    """Return the model's LM head."""
    module = model.get_output_embeddings()
    return Head(module.weight, getattr(module, "bias", None))


def model_outputs(
    model: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    kept: SampledSupport | None = None,
) -> TokenOutputs:
    """Return token_outputs() of the model's own head for its last hidden states."""
    head = head_of(model)
    return token_outputs(
        hidden,
        head.weight,
        targets,
        temperature,
        transform=support_of(model).transform,
        kept=kept,
        vocabulary=vocabulary_of(model),
        bias=head.bias,
    )


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    transform: LogitTransform = NO_TRANSFORM,
    kept: SampledSupport | None = None,
    vocabulary: VocabularySlice | None = None,
    bias: Tensor | None = None,
) -> TokenOutputs:
    """Return log-probs, entropy and sum of squares of the targets.

    hidden is (tokens, width), weight (vocabulary, width), targets (tokens,) or, for the log-probs
    of several ids per position, (tokens, targets). Log-probs and entropy are differentiable;
    `sum_squares` is not. `chunk` is the number of tokens computed at a time. `transform` is what
    the model does to its logits. With `kept`, the distribution of each token is that over its kept
    ids. With `vocabulary`, `weight` and `bias` have the rows of this rank, padded at the end, and
    all ranks of its group call this with the same tokens.
    """
    if vocabulary is not None:
        hidden = sum_gradients(hidden, vocabulary.group)
        weight, bias = _own_rows(weight, bias, vocabulary)
        targets = vocabulary.local_ids(targets)
        kept = None if kept is None else kept._replace(first=vocabulary.first)
    if chunk is None:
        chunk = _default_chunk(hidden, weight)
    # The scale is folded into the temperature and the cap: both then apply to the head's output.
    temperature = temperature / transform.scale
    softcap = None if transform.softcap is None else transform.softcap / transform.scale
    outputs: Any = _TokenOutputs.apply(
        hidden, weight, bias, targets, temperature, chunk, softcap, kept, vocabulary
    )
    return TokenOutputs(*outputs)


def _own_rows(weight: Tensor, bias: Tensor | None, vocabulary: VocabularySlice) -> Head:
    """Return the head of this rank's ids, without the padding."""
    size = vocabulary.size
    return Head(weight[:size], None if bias is None else bias[:size])


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    num_top: int,
    num_ids: int,
    temperature: float = 1.0,
    transform: LogitTransform = NO_TRANSFORM,
    vocabulary: VocabularySlice | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (tokens, num_top) ids of the most likely tokens below `num_ids`, and their log-probs.

    The probabilities are of the whole vocabulary. Without gradient, in chunks of tokens. For
    `vocabulary` see token_outputs().
    """
    first = 0
    if vocabulary is not None:
        first = vocabulary.first
        weight, bias = _own_rows(weight, bias, vocabulary)
    head = Head(upcast_head(weight), bias)
    softcap = None if transform.softcap is None else transform.softcap / transform.scale
    shape = (len(hidden), num_top)
    ids = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    top_logits = torch.full(shape, -torch.inf, device=hidden.device)  # a slice may have fewer ids
    lse = torch.zeros(len(hidden), device=hidden.device)
    chunk = _default_chunk(hidden, weight)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits = _scaled_logits(hidden[part], head, temperature / transform.scale, softcap)
        candidates = logits[:, : max(0, num_ids - first)]
        top = candidates.topk(min(num_top, candidates.shape[1]))
        ids[part, : top.indices.shape[1]] = top.indices + first
        top_logits[part, : top.indices.shape[1]] = top.values
        lse[part] = logits.logsumexp(-1)
    if vocabulary is not None:
        ids, top_logits, lse = vocabulary.join_top(ids, top_logits, lse)
    return ids, top_logits - lse[:, None]


def _default_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of tokens whose logits are held at once."""
    large = has_own_memory(hidden.device) or is_simulated_gpu(hidden.device)
    elements = LARGE_CHUNK_ELEMENTS if large else CHUNK_ELEMENTS
    return max(1, elements // weight.shape[0])


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
        kept: SampledSupport | None,
        vocabulary: VocabularySlice | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(upcast_head(weight), bias)
        own = targets.clamp(min=0)  # ids of other ranks are -1; join() replaces their values
        dtype = _upcast_dtype(hidden)
        shapes = (targets.shape, *[(len(hidden),)] * 3)
        columns = [torch.empty(shape, dtype=dtype, device=hidden.device) for shape in shapes]
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            some = None if kept is None else kept.part(start, start + chunk)
            results = _chunk_outputs(hidden[part], head, own[part], temperature, softcap, some)
            for column, result in zip(columns, results, strict=True):
                column[part] = result
        if vocabulary is not None:
            columns = vocabulary.join(targets, *columns)
        logprobs, entropy, sum_squares, lse = columns
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.parameter = weight
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.softcap = softcap
        ctx.kept = kept
        ctx.mark_non_differentiable(sum_squares)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, sum_squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_logprobs, grad_entropy, _ = grads
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        head = Head(upcast_head(weight), bias)
        grad_hidden = None
        grad_weight = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(hidden)
        sums = None
        if ctx.needs_input_grad[1]:
            sums = gradient_sums([ctx.parameter])
            grad_weight = sums
            if sums is None:
                grad_weight = torch.zeros_like(weight, dtype=_upcast_dtype(weight))
        if ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=_upcast_dtype(bias))
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad_logits = _grad_logits(
                hidden[part],
                head,
                targets[part],
                lse[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                ctx.temperature,
                ctx.softcap,
                None if ctx.kept is None else ctx.kept.part(start, start + ctx.chunk),
            )
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits.to(hidden.dtype) @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)
        if sums is not None:  # the products have been added to the master's gradient
            grad_weight = None
        return grad_hidden, _rounded(grad_weight, weight), _rounded(grad_bias, bias), *[None] * 6


def _rounded(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return the gradient in the type of its parameter."""
    return None if grad is None else grad.to(parameter.dtype)


def _use_triton(hidden: Tensor) -> bool:
    """Return whether the Triton kernels run: not on fake tensors, which stand for any device."""
    if is_simulated_gpu(hidden.device):  # there they are not launched
        return True
    return supports_triton(hidden.device) and type(hidden).__name__ != "FakeTensor"


def _chunk_outputs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    kept: SampledSupport | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, entropy, sum of squares and log-sum-exp of one chunk, (tokens,) each."""
    if _use_triton(hidden) and targets.dim() == 1 and kept is None:
        from postgrad.model.kernels.logprobs import logprob_forward

        logits = capped_logits(hidden, head, softcap).float()
        return logprob_forward(logits, targets, temperature)
    logits = _scaled_logits(hidden, head, temperature, softcap)
    if kept is not None:
        kept.exclude_others(logits)
    parts = [_outputs_of(logits[rows], targets[rows]) for rows in cache_sized_slices(logits)]
    if len(parts) == 1:
        return parts[0]
    logprobs, entropy, sum_squares, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy, sum_squares, lse


def _outputs_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-prob, entropy, sum of squares and log-sum-exp per row; overwrites the logits.

    This takes one exponential per entry. With e = exp(logit - max) and z = sum(e), p = e / z and
    H = log z - sum(e · (logit - max)) / z.
    """
    row_max = logits.amax(-1)
    target_logits = logits.gather(1, as_table(targets))
    shifted = logits.sub_(row_max[:, None]).clamp_(min=-1e30)
    e = shifted.exp()
    z = e.sum(-1)
    lse = z.log() + row_max
    sum_squares = torch.linalg.vector_norm(e, dim=-1).div(z).square()
    entropy = z.log() - e.mul_(shifted).sum(-1) / z
    logprobs = (target_logits - lse[:, None]).reshape(targets.shape)
    return logprobs, entropy, sum_squares, lse


def _grad_logits(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    kept: SampledSupport | None,
) -> Tensor:
    """Return the (tokens, vocabulary) gradient of the head's output for one chunk.

    Targets of -1 are in another rank's slice of the vocabulary. The Triton kernel returns the type
    of `hidden`; the torch path returns float32.
    """
    if grad_logprobs is None:
        grad_logprobs = torch.zeros(targets.shape, dtype=lse.dtype, device=lse.device)
    if _use_triton(hidden) and targets.dim() == 1 and kept is None:
        from postgrad.model.kernels.logprobs import logprob_backward

        capped = capped_logits(hidden, head, softcap).float()
        grad = logprob_backward(
            capped,
            targets,
            lse,
            entropy,
            grad_logprobs,
            grad_entropy,
            temperature,
            hidden.dtype,
        )
        if softcap is not None:
            grad = (grad * _cap_derivative(capped, softcap)).to(hidden.dtype)
        return grad
    logits = _scaled_logits(hidden, head, temperature, softcap)
    derivative = None if softcap is None else _cap_derivative(logits * temperature, softcap)
    if kept is not None:
        kept.exclude_others(logits)
    for rows in cache_sized_slices(logits):
        log_p = logits[rows].sub_(lse[rows, None])  # a view: the gradient replaces the logits
        by_target = as_table(grad_logprobs[rows]) / temperature
        by_logprob = by_target.sum(1, keepdim=True)
        if grad_entropy is None:  # d logp / d logit = onehot - p
            log_p.exp_().mul_(-by_logprob)
        else:  # and dH / d logit = -p (log p + H)
            by_entropy = grad_entropy[rows, None] / temperature
            p = log_p.exp()
            log_p.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(-by_entropy)
            log_p.sub_(by_logprob).mul_(p)
        ids = as_table(targets[rows])
        log_p.scatter_add_(1, ids.clamp(min=0), by_target.masked_fill(ids < 0, 0.0))
    return logits if derivative is None else logits.mul_(derivative)


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits.T @ hidden to `total`: products in the type of `hidden`, sums in float32."""
    if hidden.dtype != torch.bfloat16 or has_float32_accumulation(hidden.device):
        add_product(total, grad_logits.to(hidden.dtype).T, hidden)
        return
    with _bfloat16_products():
        total.addmm_(grad_logits.T, hidden.float())


def cache_sized_slices(logits: Tensor) -> list[slice]:
    """Return slices over the rows of the logits that stay in a CPU core's cache.

    Several operations then read each slice from the cache. Other devices get one slice.
    """
    step = max(1, len(logits))
    if logits.device.type == "cpu":
        step = max(1, CACHE_ELEMENTS // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, max(1, len(logits)), step)]


def _upcast_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scaled_logits(hidden: Tensor, head: Head, temperature: float, softcap: float | None) -> Tensor:
    logits = capped_logits(hidden, head, softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def capped_logits(hidden: Tensor, head: Head, softcap: float | None) -> Tensor:
    """Return softcap · tanh(x / softcap) of the head's output x; x itself without a cap."""
    logits = upcast_logits(hidden, *head)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _cap_derivative(capped: Tensor, softcap: float) -> Tensor:
    """Return d capped / d x, computed from the capped logits."""
    return 1 - (capped / softcap).square()


def upcast_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden @ weight.T + bias with float32 results for bfloat16 inputs.

    Bfloat16 logits of size 20 would be wrong by up to 0.06 nats. `weight` may be the result of
    upcast_head, which an engine computes once for many steps.
    """
    logits = _upcast_product(hidden, weight)
    return logits if bias is None else logits.add_(bias)


def _upcast_product(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    if has_float32_accumulation(hidden.device):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    with _bfloat16_products():
        return hidden.float() @ upcast_head(weight).T


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Multiply float32 tensors that hold bfloat16 numbers at nearly the speed of bfloat16.

    The CPU has no bfloat16 product with a float32 result. At "medium" precision torch multiplies
    in bfloat16 and sums in float32, which is exactly that product.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def upcast_head(weight: Tensor) -> Tensor:
    """Return the head's weight in the type that upcast_logits multiplies in on this device."""
    if weight.dtype == torch.bfloat16 and not has_float32_accumulation(weight.device):
        return weight.float()
    return weight
