"""Sums and means under a mask.

Masked entries are excluded by selection, not by multiplying with 0, so that a NaN there cannot
leak. Sums over rows use float32 for half precision too: bfloat16 cannot count beyond 256.
"""

import torch
from torch import Tensor


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> Tensor:
    """Sum of the unmasked entries over `dim` (None: over all), divided by a constant.

    An empty selection gives 0.
    """
    kept = torch.where(mask.bool(), tensor, 0)
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the unmasked entries over `dim` (None: over all). An empty selection gives NaN."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_normalize(tensor, mask, dim) / count


def widened(values: Tensor) -> Tensor:
    """bfloat16 and float16 as float32, everything else unchanged."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values


def row_sum(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(rows,) sum of a token column over each row's unmasked tokens; 0 for a row without any."""
    kept = torch.where(mask.bool(), widened(values), 0)
    return torch.zeros(num_rows, dtype=kept.dtype, device=kept.device).index_add(0, rows, kept)


def row_mean(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(rows,) mean of a token column over each row's unmasked tokens; 0 for a row without any."""
    counts = row_sum(torch.ones_like(values), mask, rows, num_rows)
    return row_sum(values, mask, rows, num_rows) / counts.clamp(min=1)
