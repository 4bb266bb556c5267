"""The pages of keys and values: how many there are, and which texts have them. Needs no GPU."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

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


def kv_token_bytes(model_config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    config = model_config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * num_heads * head_dim * dtype.itemsize


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


@dataclass(eq=False)
class Prompt:
    """A prompt whose tokens but the last are in pages that several texts share.

    `in_pages`: they are computed, or will be in the next prefill.
    """

    key: Hashable
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    in_pages: bool = False
    num_users: int = 0

    @property
    def num_shared(self) -> int:
        """The number of tokens in the pages."""
        return len(self.tokens) - 1


@dataclass(eq=False)
class Room:
    """The pages of one text: those of a shared prompt, and then those of its other tokens."""

    prompt: Prompt
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False)
class SavedTurn:
    """A text that a later turn may continue, and its pages."""

    tokens: list[int]
    room: Room

    def starts(self, text: list[int]) -> bool:
        """Return whether a text begins with it and has more tokens."""
        length = len(self.tokens)
        return length < len(text) and text[:length] == self.tokens


class PagePool:
    """All pages: free ones, those of texts, and those that are saved until others need them.

    Prompts that no text uses now and ended turns are saved, and given up in the order of their end:
    first the prompts.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.prompts: dict[Hashable, Prompt] = {}  # that new texts may share
        self.unused: dict[Prompt, None] = {}  # those of them that no text uses
        self.turns: dict[Hashable, SavedTurn] = {}

    def make_free(self, count: int) -> bool:
        """Return whether this many pages are free; gives up what is saved if they are not."""
        while len(self.free) < count and (self.unused or self.turns):
            if self.unused:
                self._drop(next(iter(self.unused)))
            else:
                self.forget(next(iter(self.turns)))
        return len(self.free) >= count

    def take(self, count: int) -> list[int]:
        """Return pages; this many must be free."""
        first = len(self.free) - count
        pages = self.free[first:]
        del self.free[first:]
        return pages

    def share(self, key: Hashable, tokens: list[int]) -> Prompt:
        """Return the prompt of this key for one more text; it may have no pages yet."""
        prompt = self.prompts.setdefault(key, Prompt(key, tokens))
        self.unused.pop(prompt, None)
        prompt.num_users += 1
        return prompt

    def release(self, room: Room) -> None:
        """Free the pages of a text. Those of its prompt are saved if new texts may share it."""
        self.free += room.pages
        room.pages = []
        prompt = room.prompt
        prompt.num_users -= 1
        if prompt.num_users:
            return
        if prompt.in_pages and self.prompts.get(prompt.key) is prompt:
            self.unused[prompt] = None
        else:
            self._drop(prompt)

    def _drop(self, prompt: Prompt) -> None:
        """Free the pages of a prompt that no text uses."""
        self.unused.pop(prompt, None)
        if self.prompts.get(prompt.key) is prompt:
            del self.prompts[prompt.key]
        self.free += prompt.pages
        prompt.pages = []

    def save_turn(self, key: Hashable, tokens: list[int], room: Room) -> None:
        """Save the pages of a text with these tokens; free those that have none of them."""
        self.forget(key)
        num_used = num_pages(len(tokens) - room.prompt.num_shared)
        self.free += room.pages[num_used:]
        del room.pages[num_used:]
        self.turns[key] = SavedTurn(tokens, room)

    def take_turn(self, key: Hashable) -> SavedTurn | None:
        """Return the turn that is saved for a key, which is not saved any more."""
        return self.turns.pop(key, None)

    def forget(self, key: Hashable) -> None:
        """Free what is saved for a key, if there is anything."""
        if (turn := self.turns.pop(key, None)) is not None:
            self.release(turn.room)

    def forget_all(self) -> None:
        """Free what is saved. Prompts in use are shared with no new texts."""
        for key in list(self.turns):
            self.forget(key)
        for prompt in list(self.unused):
            self._drop(prompt)
        self.prompts.clear()
