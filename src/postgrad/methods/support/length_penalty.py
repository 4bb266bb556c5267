"""Responses that come close to the length limit, or reach it."""

import torch

from postgrad.algorithms.shaping import overlong_penalty
from postgrad.types import Batch


def add_overlong_penalty(batch: Batch, max_tokens: int, buffer: int) -> None:
    """DAPO's penalty: sets `reward/overlong` and adds it to `reward`."""
    penalty = overlong_penalty(batch.response.lengths, max_length=max_tokens, buffer=buffer)
    batch.rows["reward/overlong"] = penalty.float()
    batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/overlong"]


def mask_truncated(batch: Batch) -> float:
    """Leaves responses that reached the limit out of the loss; returns their share."""
    truncated = torch.tensor([finish == "length" for finish in batch.rows["finish"]])
    batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & ~batch.expand(truncated)
    return float(truncated.float().mean())
