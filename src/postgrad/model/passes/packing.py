"""Packed passes: tokens of many rows in one sequence without padding.

A bundle is a shared segment (the prompt without its last token), followed by own segments: the
last prompt token and one response each. A token attends to its bundle's shared segment and to the
tokens before it in its own segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from postgrad.model.device import copy_async

# Queries and keys per step of a kernel. A page of the decode cache holds BLOCK_N tokens.
BLOCK_M = 64
BLOCK_N = 64
# Key blocks per chunk. A decode step splits a long row into chunks, and training merges the same
# chunks, so both round alike.
CHUNK = 8

# start, end, shared_start, shared_end, and the end of the tokens that attend to this segment
Segment = tuple[int, int, int, int, int]


class RowSpan(NamedTuple):
    """Consecutive tokens of one row in a pass; `start` and `end` count the pass's flattened ids."""

    start: int
    end: int
    row: int
    first: int  # the position of the first token in its row


@dataclass(frozen=True)
class Packing:
    """Which tokens of a packed pass attend to which, as tiles for the kernels.

    The tensors are int32 and on the model's device.
    """

    # (tiles, 5): start and end of the tile, start of its own segment, start and end of its shared
    # segment
    query_tiles: Tensor
    # (tiles, 4): start and end of the tile, end of the tokens that attend to it, end of its segment
    key_tiles: Tensor
    positions: Tensor  # (tokens,) in their rows; sliding windows are measured in them

    def to(self, device: torch.device) -> "Packing":
        tensors = (self.query_tiles, self.key_tiles, self.positions)
        return Packing(*(copy_async(tensor, device) for tensor in tensors))


def make_packing(segments: Sequence[Segment]) -> Packing:
    """Return the tiles of the segments, longest work first, so short tiles fill the gaps."""
    query_tiles: list[tuple[int, int, int, int, int]] = []
    key_tiles: list[tuple[int, int, int, int]] = []
    positions = np.zeros(max(end for _, end, *_ in segments), dtype=np.int32)
    for start, end, shared_start, shared_end, visible_until in segments:
        shared = shared_end - shared_start
        positions[start:end] = np.arange(shared, shared + end - start)
        for first in range(start, end, BLOCK_M):
            last = min(first + BLOCK_M, end)
            query_tiles.append((first, last, start, shared_start, shared_end))
        for first in range(start, end, BLOCK_N):
            key_tiles.append((first, min(first + BLOCK_N, end), visible_until, end))
    query_tiles.sort(key=_num_keys, reverse=True)
    key_tiles.sort(key=_num_queries, reverse=True)
    return Packing(
        torch.tensor(query_tiles, dtype=torch.int32),
        torch.tensor(key_tiles, dtype=torch.int32),
        torch.from_numpy(positions),
    )


def _num_keys(query_tile: tuple[int, int, int, int, int]) -> int:
    _, end, own_start, shared_start, shared_end = query_tile
    return end - own_start + shared_end - shared_start


def _num_queries(key_tile: tuple[int, int, int, int]) -> int:
    start, _, visible_until, _ = key_tile
    return visible_until - start


def num_tiles(tokens: int) -> int:
    """Return the number of tiles of one segment of this length."""
    return -(-tokens // BLOCK_M)


def padding_tiles(start: int, end: int, tiles: int, device: torch.device) -> Packing:
    """Return `tiles` tiles for the padding tokens start..end, whose positions are all 0.

    Padding tokens attend only within their own tile. Tiles that are left over cover no token.
    """
    index = torch.arange(tiles, dtype=torch.int32, device=device)
    first = (start + BLOCK_M * index).clamp_(max=end)
    last = (first + BLOCK_M).clamp_(max=end)
    zero = torch.zeros_like(first)
    query_tiles = torch.stack([first, last, first, zero, zero], 1)
    positions = torch.zeros(end - start, dtype=torch.int32, device=device)
    return Packing(query_tiles, torch.stack([first, last, last, last], 1), positions)
