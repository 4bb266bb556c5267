"""Keys and values by slot. Active rows fill slots 0..n-1; row i's tokens lie at 0..length-1 of its slot.

The objects here are handed to stock transformers blocks as their cache: a block calls update(key, value, layer) and attends to what
it gets back.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros that cost no memory until they are written: on the CPU, pages that the operating system clears when first touched.

    Zeros, not garbage: a masked position has weight 0, and 0 times a NaN that some earlier tensor left there is NaN.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(shape)


class Prefill:
    """Keeps the keys and values of one prefill pass, one entry a layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


class Slots:
    """The cache of all active rows. Memory is asked for once; the operating system hands it out as rows grow.

    A layer's keys lie as (slot, position, head, width): writing one token of every row is one copy of whole lines.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions = torch.empty(0, dtype=torch.int64)  # (active,) where this step's token goes
        self.lines = torch.empty(0, dtype=torch.int64)  # the same, counted over all slots
        self.width = 0  # longest active row, this step's token included

    def allocate(self, prefill: Prefill) -> None:
        """Make room in the shapes that the first prefill showed."""
        for source, target in ((prefill.keys, self.keys), (prefill.values, self.values)):
            for tensor in source:
                _, heads, _, size = tensor.shape
                target.append(_zeros((self.num_slots, self.max_length, heads, size), tensor))

    def admit(self, first: int, count: int, prefill: Prefill, row: int, length: int) -> None:
        """Copy a prefilled prompt into `count` slots."""
        for source, target in ((prefill.keys, self.keys), (prefill.values, self.values)):
            for from_layer, to_layer in zip(source, target, strict=True):
                to_layer[first : first + count, :length] = from_layer[row, :, :length].transpose(
                    0, 1
                )

    def move(self, source: int, target: int, length: int) -> None:
        """Close a gap: the row of one slot goes to another."""
        for layer in (*self.keys, *self.values):
            layer[target, :length] = layer[source, :length]

    def at(self, positions: Tensor) -> None:
        """Set where the next token of each active row goes."""
        self.positions = positions
        self.lines = (
            torch.arange(len(positions), device=positions.device) * self.max_length + positions
        )
        self.width = int(positions.max()) + 1

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """key and value (active, heads, 1, width) go in; (active, heads, longest, width) of all their rows come back."""
        return self._put(self.keys[layer], key), self._put(self.values[layer], value)

    def _put(self, layer: Tensor, new: Tensor) -> Tensor:
        layer.flatten(0, 1).index_copy_(0, self.lines, new[:, :, 0])
        return layer[: len(self.positions), : self.width].transpose(1, 2)

    def get_seq_length(self, *_: Any) -> int:
        return self.width - 1

    def mask(self) -> Tensor:
        """(active, 1, 1, width): each row sees its own tokens."""
        return (
            torch.arange(self.width, device=self.positions.device)[None] <= self.positions[:, None]
        )[:, None, None]
