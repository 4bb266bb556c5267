"""Log-probs and entropy of given tokens, chunk by chunk over the head, so that the full logits never exist.

The forward pass keeps one log-sum-exp a token; the backward pass computes each chunk's logits again. Everything between the
matrix products is float32. The weight's gradient accumulates in float32, so the chunk size never changes the result beyond rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postgrad.model.device import has_float32_accumulation, has_own_memory, supports_triton

CACHE_ELEMENTS = 1 << 19  # 2 MiB in float32: what a CPU core's own cache holds
CHUNK_ELEMENTS = {
    False: 1 << 24,
    True: 1 << 27,
}  # logits held at once: 64 MiB in float32, 512 MiB where passes are large


class TokenOutputs(NamedTuple):
    """(tokens,) each, float32: log-prob of the token, entropy and sum of squared probabilities of its distribution (nats)."""

    logprobs: Tensor
    entropy: Tensor
    sum_squares: Tensor


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> TokenOutputs:
    """hidden (tokens, width), weight (vocabulary, width), targets (tokens,). Log-probs and entropy are differentiable.

    `sum_squares` carries no gradient. `chunk` is tokens at a time, by default what CHUNK_ELEMENTS holds.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS[has_own_memory(hidden.device)] // weight.shape[0])
    return TokenOutputs(*_TokenOutputs.apply(hidden, weight, targets, temperature, chunk))  # type: ignore[misc]


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = upcast_head(weight)
        logprobs, entropy, squares, lse = (
            torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device) for _ in range(4)
        )
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            if _by_kernel(hidden):
                from postgrad.model.passes.kernels.logprobs import logprob_forward

                found = logprob_forward(
                    upcast_logits(hidden[part], wide).float(), targets[part], temperature
                )
                logprobs[part], entropy[part], squares[part], lse[part] = found
                continue
            logits = _logits(hidden[part], wide, temperature)
            for rows in cache_sized_slices(logits):
                found = _summary(logits[rows], targets[part][rows])
                logprobs[part][rows], entropy[part][rows], squares[part][rows], lse[part][rows] = (
                    found
                )
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_logprobs, grad_entropy, _ = grads
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        wide = upcast_head(weight)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            by_logprob, by_entropy = (
                None if x is None else x[part] for x in (grad_logprobs, grad_entropy)
            )
            g = _slope(
                hidden[part],
                wide,
                targets[part],
                lse[part],
                entropy[part],
                by_logprob,
                by_entropy,
                ctx.temperature,
            )
            if grad_hidden is not None:
                grad_hidden[part] = g.to(hidden.dtype) @ weight
            if grad_weight is not None:
                _add_product(grad_weight, g, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _by_kernel(hidden: Tensor) -> bool:
    """Whether the Triton kernels can be asked: on their device, and not where a pass is only simulated."""
    return supports_triton(hidden.device) and type(hidden).__name__ != "FakeTensor"


def _slope(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """(tokens, vocabulary) gradient of one chunk's logits: in the type of `hidden` where a kernel gives it, else wide."""
    if _by_kernel(hidden):
        from postgrad.model.passes.kernels.logprobs import logprob_backward

        by_logprob = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs.contiguous()
        by_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        logits = upcast_logits(hidden, weight).float()
        return logprob_backward(
            logits, targets, lse, entropy, by_logprob, by_entropy, temperature, hidden.dtype
        )
    out = _logits(hidden, weight, temperature)
    by_logprob, by_entropy = (
        torch.zeros_like(lse) if x is None else x / temperature
        for x in (grad_logprobs, grad_entropy)
    )
    for rows in cache_sized_slices(out):
        log_p, onehot = out[rows].sub_(lse[rows, None]), by_logprob[rows, None]
        if grad_entropy is None:  # dlogp/dlogit = onehot - p
            log_p.exp_().mul_(-onehot)
        else:  # and dH/dlogit = -p (log p + H)
            p = log_p.exp()
            log_p.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(-by_entropy[rows, None]).sub_(
                onehot
            ).mul_(p)
        log_p.scatter_add_(1, targets[rows, None], onehot)
    return out


def _add_product(total: Tensor, g: Tensor, hidden: Tensor) -> None:
    """total += g.T @ hidden, with the products that the two have in the type of `hidden` and float32 sums."""
    if hidden.dtype != torch.bfloat16 or has_float32_accumulation(hidden.device):
        total += g.T @ hidden
        return
    with _bfloat16_products():
        total.addmm_(g.T, hidden.float())


def cache_sized_slices(logits: Tensor) -> list[slice]:
    """Rows of the logits, as many at a time as stay in a core's cache while several operations pass over them."""
    step = (
        max(1, CACHE_ELEMENTS // logits.shape[-1])
        if logits.device.type == "cpu"
        else max(1, len(logits))
    )
    return [slice(start, start + step) for start in range(0, max(1, len(logits)), step)]


def _summary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the targets, entropy, sum of squared probabilities and log-sum-exp; overwrites the logits.

    One exponential an entry: p = e / z with e = exp(logit - largest), z their sum, so H = log z - sum(e (logit - largest)) / z.
    """
    top = logits.amax(-1)
    at_target = logits.gather(1, targets[:, None])[:, 0]
    below = logits.sub_(top[:, None]).clamp_(min=-1e30)
    e = below.exp()
    z = e.sum(-1)
    lse = z.log() + top
    squares = torch.linalg.vector_norm(e, dim=-1).div(z).square()
    entropy = z.log() - e.mul_(below).sum(-1) / z
    return at_target - lse, entropy, squares, lse


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = upcast_logits(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


def upcast_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T with every digit of the products kept: bfloat16 logits of size 20 would be off by up to 0.06 nats.

    `weight` may come widened already (see upcast_head), as an engine does once for many steps.
    """
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    if has_float32_accumulation(hidden.device):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    with _bfloat16_products():
        return hidden.float() @ upcast_head(weight).T


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """The CPU has no bfloat16 product with a float32 result; float32 tensors that hold bfloat16 numbers, multiplied at "medium"
    precision (bfloat16 inside, float32 sums), give exactly it at nearly the speed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def upcast_head(weight: Tensor) -> Tensor:
    """The head in the type upcast_logits multiplies in on this device."""
    return (
        weight.float()
        if weight.dtype == torch.bfloat16 and not has_float32_accumulation(weight.device)
        else weight
    )
