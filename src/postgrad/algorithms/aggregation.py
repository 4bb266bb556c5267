"""From one loss per token to one number: the weight of each token in the optimizer step.

There is one global denominator. The weights are computed once over all rows of the optimizer step,
and the loss of the step is

    loss = sum over all tokens of (token loss · weight)

A micro-batch contributes the sum over its own tokens and nothing else. The gradient is the same
however rows are split into micro-batches, packed, accumulated or sharded over ranks. Ranks must sum
gradients; if a backend averages them, multiply the loss by the number of ranks.
"""

import torch
from torch import Tensor

from postgrad.algorithms.groups import Groups
from postgrad.errors import Missing, UnknownName, did_you_mean

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
)


def token_weights(
    mode: str,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    length: float | None = None,
    *,
    groups: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(tokens,) weights w such that the loss of the whole optimizer step is sum(loss · w).

    With m the mask, N = sum(m), L_i the unmasked tokens of row i, B the rows that have one or more,
    N_g the unmasked tokens of the rows of a prompt, P the prompts that have one or more:

        token-mean               m / N
        token-sum                m
        seq-mean-token-sum       m / B
        seq-mean-token-mean      m / (L_i · B)
        seq-mean-token-sum-norm  m / (length · B)      Dr. GRPO; `length` is a constant
        prompt-mean-token-mean   m / (N_g · P)         ScaleRL; all prompts have equal weight

    Args:
        mode: one of AGGREGATIONS.
        mask: (tokens,) bool, the tokens that the loss may use.
        rows: (tokens,) int64, the row of each token.
        num_rows: the number of rows.
        length: the constant of seq-mean-token-sum-norm, such as the longest response allowed. Other
            modes ignore it.
        groups: (rows,) the prompt of each row, for prompt-mean-token-mean; None: one per row.

    A fully masked row has no weight and is not counted in B, so that rejected rows never shrink the
    gradient of the others (verl 0.9.1 counts them). An empty selection gives zeros. verl before 0.9
    and LUFFY do not divide seq-mean-token-sum-norm by B.

    Raises:
        ConfigError: unknown mode, or seq-mean-token-sum-norm without a positive length.
    """
    if mode not in AGGREGATIONS:
        raise UnknownName(
            f"unknown loss aggregation {mode!r}; {did_you_mean(mode, AGGREGATIONS)}", at="mode"
        )
    weights = mask.to(dtype)
    if mode == "token-sum":
        return weights
    counts = torch.zeros(num_rows, dtype=dtype, device=mask.device)
    counts = counts.index_add(0, rows, weights)  # (rows,) L_i
    if mode == "token-mean":
        return weights / counts.sum().clamp(min=1)
    if mode == "prompt-mean-token-mean" and groups is not None:
        rows = Groups.of(groups, rows.device).index[rows]
        counts = torch.zeros_like(counts).index_add(0, rows, weights)  # N_g, for each prompt
    weights = weights / (counts > 0).sum().clamp(min=1)
    if mode in ("seq-mean-token-mean", "prompt-mean-token-mean"):
        return weights / counts.clamp(min=1)[rows]
    if mode == "seq-mean-token-sum-norm":
        if length is None or not length > 0:
            raise Missing(
                f"loss aggregation {mode} divides by a length; got {length}, "
                "use a positive number such as the longest response allowed",
                at="length",
            )
        return weights / length
    return weights
