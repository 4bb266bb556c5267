"""Log-prob, entropy and sum of squares of each row of logits in one pass, and their gradient in another."""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _summary(
    logits, targets, logprobs, entropy, squares, lse_base, vocabulary, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocabulary
    top = tl.full([], float("-inf"), tl.float32)
    total, moment, square = (
        tl.zeros([], tl.float32),
        tl.zeros([], tl.float32),
        tl.zeros([], tl.float32),
    )
    for start in range(0, vocabulary, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < vocabulary
        x = tl.load(base + cols, mask=inside, other=float("-inf")) * inverse_temperature
        new_top = tl.maximum(top, tl.max(x, 0))
        keep = tl.exp(top - new_top)
        e = tl.exp(x - new_top)
        finite = tl.where(e > 0, x - new_top, 0.0)
        # moment is the sum of e · (x - top); it moves with the top
        moment = tl.where(
            top == float("-inf"), 0.0, keep * (moment + total * (top - new_top))
        ) + tl.sum(e * finite, 0)
        total = total * keep + tl.sum(e, 0)
        square = square * keep * keep + tl.sum(e * e, 0)
        top = new_top
    lse = top + tl.log(total)
    target = tl.load(targets + row)
    tl.store(logprobs + row, tl.load(base + target) * inverse_temperature - lse)
    tl.store(entropy + row, tl.log(total) - moment / total)
    tl.store(squares + row, square / (total * total))
    tl.store(lse_base + row, lse)


@triton.jit
def _slope(
    logits, targets, lse_base, entropy, grad_logprobs, grad_entropy, out, vocabulary, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < vocabulary
    x = (
        tl.load(logits + row * vocabulary + cols, mask=inside, other=float("-inf"))
        * inverse_temperature
    )
    log_p = x - tl.load(lse_base + row)
    p = tl.exp(log_p)
    grad = tl.load(grad_logprobs + row)
    g = tl.where(cols == tl.load(targets + row), grad, 0.0) - p * grad
    if WITH_ENTROPY:
        g -= tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0) * tl.load(
            grad_entropy + row
        )
    tl.store(
        out + row * vocabulary + cols,
        (g * inverse_temperature).to(out.dtype.element_ty),
        mask=inside,
    )


def summary(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows,) log-prob of the target, entropy, sum of squared probabilities, log-sum-exp of float32 logits / temperature."""
    rows, vocabulary = logits.shape
    out = tuple(torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    _summary[(rows,)](
        logits, targets, *out, vocabulary, 1.0 / temperature, BLOCK=BLOCK, num_warps=8
    )
    return out  # type: ignore[return-value]


def grad_logits(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """(rows, vocabulary) gradient of the logits."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    with_entropy = grad_entropy is not None
    _slope[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, targets, lse, entropy, grad_logprobs, grad_entropy if with_entropy else grad_logprobs, out, vocabulary,
        1.0 / temperature, WITH_ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out
