"""Packed passes: tokens lie flat without padding, and the responses of one prompt share its tokens.

A bundle is a shared segment (the prompt without its last token) followed by own segments, each the last prompt token and a response.
A token sees its shared segment and what lies before it in its own segment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.model.device import copy_async

BLOCK_M, BLOCK_N = (
    64,
    64,
)  # queries and keys that one step of a kernel looks at; a page of the cache holds BLOCK_N tokens
CHUNK = 8  # blocks of keys that are weighed together before they join the rest: a decode step divides a long row into them


@dataclass(frozen=True)
class Packing:
    """Which tokens of a packed pass see which, as tiles that the kernels walk; int32, on the model's device."""

    query_tiles: Tensor  # (tiles, 5): first and end of the tile, start of its own segment, start and end of its shared segment
    key_tiles: Tensor  # (tiles, 3): first and end of the tile, end of the tokens that may see it

    def to(self, device: torch.device) -> "Packing":
        return Packing(copy_async(self.query_tiles, device), copy_async(self.key_tiles, device))


def make_packing(segments: list[tuple[int, int, int, int, int]]) -> Packing:
    """Tiles of segments (start, end, shared_start, shared_end, end of the tokens that see this segment)."""
    queries, keys = [], []
    for start, end, shared_start, shared_end, seen_until in segments:
        queries += [
            (at, min(at + BLOCK_M, end), start, shared_start, shared_end)
            for at in range(start, end, BLOCK_M)
        ]
        keys += [(at, min(at + BLOCK_N, end), seen_until) for at in range(start, end, BLOCK_N)]
    # The longest work first: short tiles then fill the gaps at the end.
    queries.sort(key=lambda tile: -(tile[1] - tile[2] + tile[4] - tile[3]))
    keys.sort(key=lambda tile: -(tile[2] - tile[0]))
    return Packing(torch.tensor(queries, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32))


def num_tiles(tokens: int) -> int:
    """Tiles of one segment of this length."""
    return -(-tokens // BLOCK_M)


def padding_tiles(start: int, end: int, tiles: int, device: torch.device) -> Packing:
    """As many tiles, of which the first cover start..end with tokens that see nobody beyond their tile, and the others nothing."""
    first = (start + BLOCK_M * torch.arange(tiles, dtype=torch.int32, device=device)).clamp_(
        max=end
    )
    last, nothing = (first + BLOCK_M).clamp_(max=end), torch.zeros_like(first)
    return Packing(
        torch.stack([first, last, first, nothing, nothing], 1), torch.stack([first, last, last], 1)
    )
