"""Log-prob, entropy and sum of squared probabilities of each row of logits, and their gradient.

The forward kernel reads each row of logits once; the backward kernel writes the logits' gradient.
"""

import torch
from torch import Tensor

from postgrad.model.kernels.launch import launch, tl, triton

BLOCK = 4096


@triton.jit
def _logprob_forward(
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, sum_squares_ptr, lse_ptr,
    vocabulary, inverse_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """Online softmax over one row: the maximum is updated and the sums rescaled block by block."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocabulary
    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.zeros([], tl.float32)
    moment = tl.zeros([], tl.float32)  # the sum of exp(x - row_max) · (x - row_max)
    square_sum = tl.zeros([], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        in_row = cols < vocabulary
        x = tl.load(row_ptr + cols, mask=in_row, other=float("-inf")) * inverse_temperature
        new_max = tl.maximum(row_max, tl.max(x, 0))
        rescale = tl.exp(row_max - new_max)
        e = tl.exp(x - new_max)
        finite = tl.where(e > 0, x - new_max, 0.0)
        moved_moment = rescale * (moment + exp_sum * (row_max - new_max))
        moved_moment = tl.where(row_max == float("-inf"), 0.0, moved_moment)
        moment = moved_moment + tl.sum(e * finite, 0)
        exp_sum = exp_sum * rescale + tl.sum(e, 0)
        square_sum = square_sum * rescale * rescale + tl.sum(e * e, 0)
        row_max = new_max
    lse = row_max + tl.log(exp_sum)
    target = tl.load(target_ptr + row)
    tl.store(logprob_ptr + row, tl.load(row_ptr + target) * inverse_temperature - lse)
    tl.store(entropy_ptr + row, tl.log(exp_sum) - moment / exp_sum)
    tl.store(sum_squares_ptr + row, square_sum / (exp_sum * exp_sum))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _logprob_backward(
    logits_ptr, target_ptr, lse_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, out_ptr,
    vocabulary, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < vocabulary
    offsets = row * vocabulary + cols
    logits = tl.load(logits_ptr + offsets, mask=in_row, other=float("-inf"))
    log_p = logits * inverse_temperature - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    is_target = cols == tl.load(target_ptr + row)
    grad = tl.where(is_target, grad_logprob, 0.0) - p * grad_logprob
    if WITH_ENTROPY:
        entropy_term = tl.where(p > 0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
        grad -= entropy_term * tl.load(grad_entropy_ptr + row)
    grad = (grad * inverse_temperature).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, grad, mask=in_row)


def logprob_forward(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (rows,) log-prob of the target, entropy, sum of squared probabilities, log-sum-exp.

    `logits` are float32 (rows, vocabulary), divided by the temperature in the kernel.
    """
    rows, vocabulary = logits.shape
    logprobs, entropy, sum_squares, lse = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    launch(
        _logprob_forward, (rows,),
        logits, targets, logprobs, entropy, sum_squares, lse, vocabulary, 1.0 / temperature,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return logprobs, entropy, sum_squares, lse


def logprob_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the (rows, vocabulary) gradient of the logits, in `dtype`.

    The columns may be strided: those of a vocabulary in slices are parts of a table.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    grad_logprobs = grad_logprobs.contiguous()
    with_entropy = grad_entropy is not None
    if grad_entropy is not None:
        grad_entropy = grad_entropy.contiguous()
    launch(
        _logprob_backward, (rows, triton.cdiv(vocabulary, BLOCK)),
        logits, targets.contiguous(), lse.contiguous(), entropy.contiguous(), grad_logprobs,
        grad_entropy if with_entropy else grad_logprobs, out, vocabulary, 1.0 / temperature,
        WITH_ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out
