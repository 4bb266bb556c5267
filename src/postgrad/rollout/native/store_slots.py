"""The store over the stock model, for any device: each sequence has one line of the cache.

Prefill and decoding are the same pass: new tokens of some lines are written to the cache, and
attend to all earlier ones of their line. A decode step is the pass with one token per line.
"""

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from postgrad.model.passes.attention import with_blocks
from postgrad.model.passes.head import Head, head_of, upcast_head, upcast_logits
from postgrad.model.passes.packing import RowSpan
from postgrad.model.passes.support import LogitTransform, has_window, vision_of
from postgrad.rollout.native.sampling import (
    DRAW,
    SeededRandom,
    find_top_tokens,
    logprobs_at,
    sample_mixed_tokens,
    truncate,
)
from postgrad.rollout.native.sequence import Sequence

if TYPE_CHECKING:  # imported by runs with pictures
    from postgrad.model.vision import PlacedPictures

PREFILL_TOKENS = 8192  # padded prompt tokens per prefill pass
# Tokens of a long prompt that a CPU computes between two tokens of a server's running sequences.
CPU_PASS_TOKENS = 256


def tokens_per_pass(num_keys: int) -> int:
    """Return how many tokens of a row one pass computes, if they attend to this many keys.

    Its attention mask is at most that of PREFILL_TOKENS tokens that attend to each other.
    """
    return max(1, min(PREFILL_TOKENS, PREFILL_TOKENS**2 // num_keys))


def bucket(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, ...

    The result is at most 1.5 times `count`, and there are few different sizes.
    """
    power = 1 << (count - 1).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if power >= 4 and count <= three_quarters else power


class ModelToSample(Protocol):
    """What a store needs of an engine."""

    model: Any
    stop_ids: Tensor
    logit_transform: LogitTransform

    @property
    def device(self) -> torch.device: ...


@dataclass
class SavedText:
    """The keys and values of a text outside of the slots: a shared prompt, or an ended turn."""

    tokens: list[int]
    layers: list[Tensor]  # (tokens, heads, head_dim) each

    def starts(self, text: list[int]) -> bool:
        """Return whether a text begins with it and has more tokens."""
        length = len(self.tokens)
        return length < len(text) and text[:length] == self.tokens


class SlotCache:
    """The keys and values of all lines; the transformers blocks get it as their cache.

    Each layer is one tensor (slot, position, head, head_dim). What is written beyond the end of a
    text, for padding and for slots without a sequence, is overwritten before it is read.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.layers: dict[tuple[str, int], Tensor] = {}

    def begin_pass(self, slots: list[int], positions: Tensor) -> None:
        """Set the slots (rows,) and the positions (rows, new) of the tokens of the next pass."""
        self.positions = positions
        self.width = int(positions.max()) + 1
        rows = torch.tensor(slots, device=positions.device)
        self.lines = (rows[:, None] * self.max_length + positions).flatten()
        # Consecutive slots are a view of the cache; others are copied.
        end = slots[0] + len(slots)
        is_consecutive = slots == list(range(slots[0], end))
        self.slots = slice(slots[0], end) if is_consecutive else rows

    def mask(self, blocks: Tensor | None = None) -> Tensor:
        """Return the attention mask (rows, 1, new, width): a token attends to its line so far.

        `blocks` (rows, new) are numbers of pictures whose tokens see each other; 0 for text.
        """
        columns = torch.arange(self.width, device=self.positions.device)
        mask = columns <= self.positions[:, None, :, None]
        if blocks is None:
            return mask
        of_keys = blocks.new_zeros(len(blocks), self.width).scatter(1, self.positions, blocks)
        return with_blocks(mask, blocks, of_keys)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens (rows, heads, new, head_dim).

        Returns all keys and values of their lines, each (rows, heads, width, head_dim).
        """
        return self._write(("key", layer), key), self._write(("value", layer), value)

    def _write(self, name: tuple[str, int], new: Tensor) -> Tensor:
        tokens = new.transpose(1, 2)
        if name not in self.layers:
            self.layers[name] = self._new_layer(tokens)
        layer = self.layers[name]
        layer.flatten(0, 1).index_copy_(0, self.lines, tokens.flatten(0, 1))
        return layer[self.slots, : self.width].transpose(1, 2)

    def _new_layer(self, like: Tensor) -> Tensor:
        return _lazy_zeros((self.num_slots, self.max_length, *like.shape[2:]), like)

    def get_seq_length(self, *_: Any) -> int:
        return self.width - self.positions.shape[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another slot."""
        for layer in self.layers.values():
            layer[target, :length] = layer[source, :length]

    def save(self, slot: int, text: list[int]) -> SavedText:
        """Return a copy of the start of a slot, which holds this text."""
        layers = [layer[slot, : len(text)].clone() for layer in self.layers.values()]
        return SavedText(text, layers)

    def load(self, slot: int, saved: SavedText) -> None:
        """Write a saved text to the start of a slot."""
        for layer, tokens in zip(self.layers.values(), saved.layers, strict=True):
            layer[slot, : len(tokens)] = tokens

    def grow(self, max_length: int) -> None:
        """Make the slots long enough for texts of this many tokens."""
        if max_length <= self.max_length:
            return
        old_length = self.max_length
        self.max_length = max_length
        for name, layer in self.layers.items():
            self.layers[name] = self._new_layer(layer)
            self.layers[name][:, :old_length] = layer


def _lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros; on the CPU they take no memory until they are written.

    They must be zeros: a masked position has weight 0, and 0 times an old NaN is NaN.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(shape)


class SlotStore:
    """The store of an engine over the stock model; see scheduler.Store.

    Args:
        engine: has the model.
        capacity: sequences that decode at the same time, and ended turns that are saved.
        longest: tokens of prompt and response together; slots grow for longer ones.
        chunk: the most tokens of a prompt that are computed before others decode; 0: all.
    """

    def __init__(
        self, engine: ModelToSample, capacity: int, longest: int = 0, chunk: int = 0
    ) -> None:
        self.engine = engine
        self.capacity = capacity
        self.chunk = chunk
        self.cache = SlotCache(capacity, longest)
        self.stop_ids = frozenset(engine.stop_ids.tolist())
        self.random = SeededRandom()
        self.uniforms: dict[Sequence, np.ndarray] = {}  # the last random numbers of each row
        self.rows: list[Sequence] = []  # by slot, without gaps: decoding then copies nothing
        self.prompts: dict[Hashable, SavedText] = {}  # by job: waiting sequences share them
        self.turns: dict[Hashable, SavedText] = {}  # by key: ended ones, oldest first
        self.reload_weights()

    # ---- room

    def start(self, waiting: Collection[Sequence]) -> bool:
        if len(self.rows) == self.capacity:
            return False
        sequence = next(iter(waiting))
        sequence.job.find_pictures(self.engine.model)
        self.cache.grow(len(sequence.job.request.prompt) + sequence.job.limit)
        sequence.slot = len(self.rows)
        self.rows.append(sequence)
        self._load(sequence)
        return True

    def reserve(self, running: Collection[Sequence]) -> int:
        return 1  # a slot has room for the longest text

    def release(self, leaving: Collection[Sequence]) -> None:
        for sequence in leaving:
            if sequence.finish and sequence.key is not None:
                self._save_turn(sequence)
        gone = set(leaving)
        left = [row for row in self.rows if row not in gone]
        gaps = [row.slot for row in leaving if row.slot < len(left)]
        moving = [row for row in left if row.slot >= len(left)]
        for slot, row in zip(gaps, moving, strict=True):
            self.cache.move(row.slot, slot, row.num_computed)
            row.slot = slot
        self.rows = sorted(left, key=lambda row: row.slot)
        for sequence in leaving:
            sequence.slot = -1
            sequence.num_computed = 0
            self.uniforms.pop(sequence, None)

    def close(self) -> None:
        """Do nothing: the slots are freed with the store."""

    # ---- saved texts

    def forget(self, owner: Hashable) -> None:
        self.prompts.pop(owner, None)
        self.turns.pop(owner, None)

    def reload_weights(self) -> None:
        self.prompts.clear()
        self.turns.clear()
        weight, bias = head_of(self.engine.model)
        self.head = Head(upcast_head(weight), bias)  # in bfloat16 it may be a copy

    def _load(self, sequence: Sequence) -> None:
        """Give a new sequence the keys and values that are saved of the start of its text."""
        if sequence.num_computed:
            return
        saved = self.turns.pop(sequence.key, None) or self.prompts.get(sequence.job)
        if saved is not None and saved.starts(sequence.text):
            self.cache.load(sequence.slot, saved)
            sequence.num_computed = len(saved.tokens)

    def _save_prompt(self, sequence: Sequence) -> None:
        """Save a prompt that is complete, if other sequences of its job wait for it."""
        job = sequence.job
        length = len(job.request.prompt) - 1
        if job.num_waiting > 1 and job not in self.prompts and sequence.num_computed >= length:
            self.prompts[job] = self.cache.save(sequence.slot, sequence.text[:length])

    def _save_turn(self, sequence: Sequence) -> None:
        """Save an ended turn that a later request may continue; the oldest one may go."""
        if len(sequence.versions) > 1:
            return  # its keys are of several weights
        text = sequence.text[: sequence.num_computed]  # all but its last token
        self.turns[sequence.key] = self.cache.save(sequence.slot, text)
        while len(self.turns) > self.capacity:
            del self.turns[next(iter(self.turns))]

    # ---- passes

    def prefill(self, starting: Collection[Sequence]) -> None:
        while rows := self._next_pass(starting):
            self._compute(rows)
            for sequence in starting:
                self._load(sequence)
            if self.chunk:
                return  # the rest follows after a token of the running sequences

    def _next_pass(self, starting: Collection[Sequence]) -> list[Sequence]:
        """Return sequences whose next missing tokens fit into one pass.

        Until a prompt is saved for all sequences of its job, only one of them is there.
        """
        rows: dict[Hashable, Sequence] = {}
        width = longest = 0
        for sequence in starting:
            has_prompt = sequence.num_computed >= len(sequence.job.request.prompt) - 1
            owner = sequence if has_prompt else sequence.job
            if not sequence.num_missing or owner in rows:
                continue
            width = max(width, self._num_next(sequence))
            longest = max(longest, sequence.num_computed + width)
            if rows and width * (len(rows) + 1) > tokens_per_pass(longest):
                break
            rows[owner] = sequence
        return list(rows.values())

    def _num_next(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence the next pass computes."""
        missing = sequence.num_missing
        pictures = sequence.job.pictures
        if pictures is not None and pictures.blocks is not None:
            return missing  # the tokens of a picture see each other
        return min(missing, self.chunk or missing, tokens_per_pass(sequence.num_computed + missing))

    def _compute(self, rows: list[Sequence]) -> None:
        """Compute the next missing tokens of these sequences in one pass."""
        counts = [self._num_next(row) for row in rows]
        ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for line, row, count in zip(ids, rows, counts, strict=True):
            line[:count] = torch.tensor(row.text[row.num_computed :][:count])
        firsts = torch.tensor([row.num_computed for row in rows])
        positions = firsts[:, None] + torch.arange(ids.shape[1])
        placed = self._place_pictures(rows, counts, ids.shape[1])
        states = self._forward([row.slot for row in rows], ids, positions, placed)
        for line, row, count in zip(states, rows, counts, strict=True):
            if row.job.scores_prompt and len(row.job.prompt_logprobs) == row.num_computed:
                row.job.score_prompt(line[:count], self._compute_logits)
            row.num_computed += count
            self._save_prompt(row)

    def decode(self, running: Collection[Sequence], steps: int) -> None:
        samplings = [row.job.sampling for row in self.rows]
        uniforms = torch.tensor([self._uniform(row) for row in self.rows], dtype=torch.float64)
        logits = self._next_logits()
        tokens, logprobs = sample_mixed_tokens(logits, uniforms.to(logits.device), samplings)
        kept_ids = truncate(logits, logprobs, samplings)
        results = list(zip(tokens.tolist(), logprobs.tolist(), kept_ids, strict=True))
        for row in running:
            if row.job.num_top:
                line = logprobs_at(logits[row.slot : row.slot + 1], row.job.sampling.temperature)
                row.top_tokens += find_top_tokens(line, row.job.num_top)
            row.num_computed += 1
            token, logprob, kept = results[row.slot]
            row.kept_ids.append(kept)
            row.append([token], [logprob], self.stop_ids)

    def _uniform(self, row: Sequence) -> float:
        """Return the random number of a row's next token."""
        place = row.num_tokens % DRAW
        if not place or row not in self.uniforms:
            self.uniforms[row] = self.random.draw(row.seed, row.num_tokens - place, DRAW)
        return float(self.uniforms[row][place])

    def _next_logits(self) -> Tensor:
        """Return the logits (rows, vocabulary) after the last token of each row.

        The number of rows is rounded up to a bucket with unused slots, because kernel libraries
        compile code for each new shape. A row whose prompt is not complete takes part like an
        unused slot.
        """
        num_rows = len(self.rows)
        size = min(bucket(num_rows), self.capacity)
        ids = torch.zeros(size, 1, dtype=torch.int64)
        positions = torch.zeros(size, 1, dtype=torch.int64)
        ids[:num_rows, 0] = torch.tensor([row.last_token for row in self.rows])
        positions[:num_rows, 0] = torch.tensor([row.num_computed for row in self.rows])
        offsets = torch.zeros(size, 1, dtype=torch.int64)
        for row in self.rows:
            if row.job.pictures is not None:
                offsets[row.slot] = row.job.pictures.offset
        hidden = self._forward(list(range(size)), ids, positions, offsets=offsets)[:, 0]
        return self._compute_logits(hidden)[:num_rows]

    def _place_pictures(
        self, rows: list[Sequence], counts: list[int], width: int
    ) -> "PlacedPictures | None":
        """Return the pictures of a pass whose lines have the next `counts` tokens of rows."""
        pictures = [row.job.pictures for row in rows]
        if not any(pictures):
            return None
        spans = [
            RowSpan(line * width, line * width + count, line, row.num_computed)
            for line, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        model = self.engine.model
        return vision_of(model).place_spans(model, spans, pictures, len(rows) * width)

    def _forward(
        self,
        slots: list[int],
        ids: Tensor,
        positions: Tensor,
        placed: "PlacedPictures | None" = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Compute the tokens ids (rows, new) at these positions (rows, new) of some slots.

        `placed` are the pictures of a prefill; `offsets` (rows, 1) is what rotary positions after
        pictures have more. Returns the last hidden states (rows, new, width).
        """
        device = self.engine.device
        # Padding must not reach into the next slot. No text has a key at a slot's last position.
        positions = positions.clamp(max=self.cache.max_length - 1).to(device)
        self.cache.begin_pass(slots, positions)
        model = self.engine.model
        window = {"token_positions": positions} if has_window(model) else {}
        decoder = model.base_model
        mask = self.cache.mask()
        inputs = {"input_ids": ids.to(device), "position_ids": positions}
        if offsets is not None and offsets.any():
            rotary = positions + offsets.to(device)
            inputs["position_ids"] = torch.stack([positions, rotary, rotary, rotary])
        if placed is not None:
            decoder = model.get_decoder()
            embedded = vision_of(model).language_inputs(model, ids.to(device), placed.to(device))
            inputs = {"position_ids": positions, **embedded}
            if placed.blocks is not None:
                mask = self.cache.mask(placed.blocks.view(ids.shape).to(device))
        return decoder(
            **inputs,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **window,
        ).last_hidden_state

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (rows, vocabulary) of the last hidden states (rows, width)."""
        transform = self.engine.logit_transform
        logits = upcast_logits(hidden, *self.head).float()
        if transform.scale != 1.0:
            logits = logits * transform.scale
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        return logits
