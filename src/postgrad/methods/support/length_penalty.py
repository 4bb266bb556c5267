"""DAPO's penalty of responses that come close to the length limit."""

from postgrad.algorithms.shaping import overlong_penalty
from postgrad.types import Batch


def add_overlong_penalty(batch: Batch, max_tokens: int, buffer: int) -> None:
    """Sets `reward/overlong` and adds it to `reward`."""
    penalty = overlong_penalty(batch.response.lengths, max_length=max_tokens, buffer=buffer)
    batch.rows["reward/overlong"] = penalty.float()
    batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/overlong"]
