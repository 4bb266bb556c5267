"""Sizes of the paged cache of keys and values: pages, rows and bytes. Needs no GPU."""

from postgrad.model.passes.packing import BLOCK_N as PAGE

# A cache up to this size keeps its memory between calls of generate.
KEPT_CACHE_BYTES = 4 << 30
# Device memory for what decoding and prefill allocate beside the cache.
SAMPLING_BYTES = 3 << 30


def num_pages(num_tokens: int) -> int:
    """Return the number of pages that hold this many tokens."""
    return -(-num_tokens // PAGE)


def graph_rows(rows: int) -> int:
    """Round up to the row counts of graphs: powers of two from 8 to 256, multiples of 256 above."""
    if rows <= 256:
        return max(8, 1 << (rows - 1).bit_length())
    return -(-rows // 256) * 256


def largest_cache(free: int, detachable: bool) -> int:
    """Return the bytes that the cache may take of the `free` ones.

    A detachable cache gives its memory back while the trainer works, so it may take nearly all.
    """
    if not detachable:
        return free // 3
    return max(free // 3, int(0.9 * free) - SAMPLING_BYTES)
