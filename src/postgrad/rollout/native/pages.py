"""Sizes of the paged cache of keys and values: pages, rows and bytes. Needs no GPU."""

from typing import Protocol

from postgrad.errors import CacheMemoryError
from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.rollout.native.tables import BufferSizes

# A cache up to this size keeps its memory between calls of generate.
KEPT_CACHE_BYTES = 4 << 30
# Device memory for what decoding and prefill allocate beside the cache.
SAMPLING_BYTES = 3 << 30


class PageBuffers(Protocol):
    """The part of decoder.Decoder that has the pages."""

    sizes: BufferSizes

    def page_bytes(self) -> int: ...

    def drop_pages(self) -> None: ...


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


def fit_pages(
    decoder: PageBuffers, wanted: int, row_pages: int, cache_bytes: int, longest_row: int
) -> int:
    """Return the number of pages for a cache.

    Needs differ from step to step. A cache that is a little smaller than the worst case is kept,
    and with it the graphs that use its buffers.

    Args:
        decoder: has the present cache.
        wanted: pages for all rows.
        row_pages: the largest number of pages of one row.
        cache_bytes: memory for the pages.
        longest_row: its tokens, for the error.

    Raises:
        CacheMemoryError: one row does not fit.
    """
    page_bytes = decoder.page_bytes()
    max_pages = max(1, cache_bytes // page_bytes)
    if max_pages < row_pages + 1:
        needed_gib = (row_pages + 1) * page_bytes / 2**30
        raise CacheMemoryError(
            f"one trajectory of {longest_row} tokens needs {needed_gib:.1f} GiB of cache",
            "raise rollout.cache_gib",
        )
    present = decoder.sizes.pages
    if present > max_pages:  # the trainer holds more memory than at the last call
        decoder.drop_pages()
        present = 0
    pages = present if wanted * 4 <= present * 5 else min(wanted, max_pages)
    return max(pages, row_pages + 1)
