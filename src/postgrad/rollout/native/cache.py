"""Key-value caches of the decode loop over the stock model.

Active row i has slot i; its tokens are at positions 0 to length - 1 of the slot. The transformers
blocks get these objects as their cache: a block calls update(key, value, layer) and attends to the
tensors that are returned.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros; on the CPU they take no memory until they are written.

    They must be zeros: a masked position has weight 0, and 0 times an old NaN is NaN.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(shape)


class PrefillCache:
    """Keeps the keys and values of prefilled prompts, one entry per layer.

    A long prompt comes in several passes; each adds its tokens after those of the passes before.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far, each (rows, heads, tokens, head_dim)."""
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], 2)
            self.values[layer] = torch.cat([self.values[layer], value], 2)
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, *_: Any) -> int:
        return self.keys[0].shape[2] if self.keys else 0


class SlotCache:
    """The keys and values of all active rows.

    Each layer is one tensor (slot, position, head, head_dim), so writing one token per row copies
    whole contiguous lines. It is allocated once, for `num_slots` rows of `max_length` tokens.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions = torch.empty(0, dtype=torch.int64)  # (rows,) of this step's tokens
        self.lines = torch.empty(0, dtype=torch.int64)  # (rows,) the same, counted over all slots
        self.width = 0  # tokens of the longest row, this step's token included

    def allocate(self, prefill: PrefillCache) -> None:
        """Allocate the tensors with the shapes of the first prefill pass."""
        for source, target in ((prefill.keys, self.keys), (prefill.values, self.values)):
            for tensor in source:
                target.append(self.new_layer(tensor.transpose(1, 2)))

    def new_layer(self, like: Tensor) -> Tensor:
        """Return an empty layer for tokens of the shape and type of `like` (..., head, dim)."""
        return _lazy_zeros((self.num_slots, self.max_length, *like.shape[2:]), like)

    def copy_prompts(
        self, first_slot: int, prefill: PrefillCache, rows: list[int], length: int
    ) -> None:
        """Copy these rows of a prefill pass, `length` tokens each, into slots from `first_slot` on.

        What a slot gets beyond its own prompt is overwritten before it is read.
        """
        slots = slice(first_slot, first_slot + len(rows))
        index = torch.tensor(rows, device=prefill.keys[0].device)
        for source, target in ((prefill.keys, self.keys), (prefill.values, self.values)):
            for from_layer, to_layer in zip(source, target, strict=True):
                prompts = from_layer[:, :, :length].index_select(0, index)
                to_layer[slots, :length] = prompts.transpose(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row of `length` tokens to another slot."""
        for layer in (*self.keys, *self.values):
            layer[target, :length] = layer[source, :length]

    def set_positions(self, positions: Tensor) -> None:
        """Set the position (rows,) of each row's next token."""
        slots = torch.arange(len(positions), device=positions.device)
        self.positions = positions
        self.lines = slots * self.max_length + positions
        self.width = int(positions.max()) + 1

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Write one token's key and value (rows, heads, 1, head_dim) per row.

        Returns all keys and values of these rows, each (rows, heads, width, head_dim).
        """
        return self._write(self.keys[layer], key), self._write(self.values[layer], value)

    def _write(self, layer: Tensor, new: Tensor) -> Tensor:
        layer.flatten(0, 1).index_copy_(0, self.lines, new[:, :, 0])
        return layer[: len(self.positions), : self.width].transpose(1, 2)

    def get_seq_length(self, *_: Any) -> int:
        return self.width - 1

    def mask(self) -> Tensor:
        """Return the attention mask (rows, 1, 1, width): each row attends to its own tokens."""
        columns = torch.arange(self.width, device=self.positions.device)
        return (columns[None] <= self.positions[:, None])[:, None, None]


class PageWriter:
    """The cache object of a prefill pass on a CUDA device: writes keys and values to their pages.

    Args:
        keys, values: (layers, pages, tokens per page, heads, head_dim).
        lines: (tokens,) for each token of the pass, page * tokens per page + position in the page.
        earlier: (earlier tokens,) the same for tokens of earlier passes, which are attended to.
    """

    def __init__(self, keys: Tensor, values: Tensor, lines: Tensor, earlier: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.lines = lines
        self.earlier = earlier

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values, then earlier ones: (1, heads, new + earlier, head_dim)."""
        return self._write(self.keys[layer], key), self._write(self.values[layer], value)

    def _write(self, pages: Tensor, new: Tensor) -> Tensor:
        tokens = pages.flatten(0, 1)  # (pages * tokens per page, heads, head_dim)
        tokens.index_copy_(0, self.lines, new[0].transpose(0, 1))
        if not len(self.earlier):
            return new
        return torch.cat([new, tokens[self.earlier].transpose(0, 1)[None]], 2)

    def get_seq_length(self, *_: Any) -> int:
        return 0
