"""How rows are laid out for a forward pass: micro-batches of bundles within a token budget.

A bundle is one prompt with one or more of the responses sampled from it: the prompt is computed once, each response sees the
prompt and itself. Bundles are sorted by length and padded to the longest of their micro-batch. None of this changes a number
beyond float rounding; it only changes how much is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.model.device import copy_async, has_own_memory, supports_triton
from postgrad.model.passes.packing import Packing, make_packing
from postgrad.model.passes.row_attention import Segment, Spread, make_spread
from postgrad.types import Batch

PACKED_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. `hidden[gather]` (over the flattened batch x length) predicts the response tokens of `rows`, in order."""

    rows: list[int]
    ids: Tensor  # (bundles, length)
    positions: Tensor  # (bundles, length)
    mask: Tensor | None  # (bundles, 1, length, length) bool; None: plain causal
    gather: Tensor  # (response tokens of rows,)
    packing: Packing | Spread | None = None  # for one row of packed tokens

    def to(self, device: torch.device) -> "MicroBatch":
        ids, positions, gather = (
            copy_async(x, device) for x in (self.ids, self.positions, self.gather)
        )
        mask = None if self.mask is None else copy_async(self.mask, device)
        packing = None if self.packing is None else self.packing.to(device)
        return MicroBatch(self.rows, ids, positions, mask, gather, packing)

    @property
    def num_tokens(self) -> int:
        """Padded size: what the token budget bounds."""
        return self.ids.numel()


def make_micro_batches(
    batch: Batch,
    token_budget: int,
    model: Any,
    row_groups: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Micro-batches that cover the batch: packed where the device has the kernels and the model is one they know, else padded.

    `device` is where the passes run, unless that is where the model's parameters lie.
    """
    where: torch.device = next(model.parameters()).device if device is None else device
    budget = token_budget or default_token_budget(where)
    if supports_packing(model) and (supports_triton(where) or where.type == "cpu"):
        return make_packed_micro_batches(
            batch, budget, row_groups, make_packing if supports_triton(where) else make_spread
        )
    return make_padded_micro_batches(
        batch, budget, int(model.config.get_text_config().hidden_size), row_groups
    )


def default_token_budget(device: torch.device, launched: bool = False) -> int:
    """Tokens of a pass where training.token_budget is 0; more on a GPU where passes are launched kernel by kernel, not recorded."""
    return 16384 if launched and has_own_memory(device) else 8192


def supports_packing(model: Any) -> bool:
    """Whether the model's attention understands a packing (see kernels/install.py)."""
    config = model.config.get_text_config()
    return config.model_type in PACKED_FAMILIES and not getattr(config, "use_sliding_window", False)


def make_padded_micro_batches(
    batch: Batch, token_budget: int, width: int, row_groups: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Micro-batches that cover every row with a response once. `width` is the model's, to weigh attention against the rest.

    `together` gives each row a unit; rows of one unit (the two sides of a preference pair) come into the same micro-batch.
    """
    bundles = _bundles(batch, token_budget, width)
    units = _join_units(bundles, row_groups)
    units.sort(key=lambda unit: -max(_length(batch, bundle) for bundle in unit))
    out: list[MicroBatch] = []
    current: list[list[int]] = []
    longest = 0
    for unit in units:
        length = max(longest, *(_length(batch, bundle) for bundle in unit))
        if current and length * (len(current) + len(unit)) > token_budget:
            out.append(_assemble(batch, current))
            current, longest = [], 0
        current.extend(unit)
        longest = max(longest, *(_length(batch, bundle) for bundle in unit))
    if current:
        out.append(_assemble(batch, current))
    return out


def make_packed_micro_batches(
    batch: Batch,
    token_budget: int,
    row_groups: Sequence[int] | None = None,
    attend: Callable[[list[Segment]], Packing | Spread] = make_packing,
) -> list[MicroBatch]:
    """The same for devices whose attention takes packed tokens: no padding, every prompt once in a pass.

    The shared part of a bundle is the prompt without its last token; each row's own part begins with that token, so that its n inputs
    predict its n response tokens.
    """
    prompts = [tuple(p.tolist()) for p in batch.prompt.split()]
    lengths = batch.response.lengths.tolist()
    members: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            members.setdefault(row if row_groups is None else row_groups[row], []).append(row)
    units = sorted(
        members.values(), key=lambda unit: prompts[unit[0]]
    )  # rows of one prompt side by side
    out: list[MicroBatch] = []
    current: list[int] = []
    seen: set[tuple[int, ...]] = set()
    total = 0
    for unit in units:
        own = sum(lengths[row] for row in unit)
        fresh = {prompts[row] for row in unit} - seen
        if current and total + own + sum(len(p) - 1 for p in fresh) > token_budget:
            out.append(_pack(batch, current, prompts, attend))
            current, seen, total = [], set(), 0
            fresh = {prompts[row] for row in unit}
        current += unit
        seen |= fresh
        total += own + sum(len(p) - 1 for p in fresh)
    return [*out, _pack(batch, current, prompts, attend)] if current else out


def _pack(
    batch: Batch,
    rows: list[int],
    prompts: list[tuple[int, ...]],
    attend: Callable[[list[Segment]], Packing | Spread],
) -> MicroBatch:
    bundles: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        bundles.setdefault(prompts[row], []).append(row)
    starts, values = batch.response.offsets.tolist(), batch.response.values.numpy()
    ids: list[Any] = []
    positions: list[Any] = []
    gather: list[Any] = []
    segments: list[Segment] = []
    order = np.arange(
        max(
            len(prompt) + starts[row + 1] - starts[row]
            for prompt, members in bundles.items()
            for row in members
        )
    )
    at = 0
    for prompt, members in bundles.items():
        shared = len(prompt) - 1
        begin, end = at, at + shared + sum(starts[row + 1] - starts[row] for row in members)
        ids.append(np.array(prompt[:-1], dtype=np.int64))
        positions.append(order[:shared])
        if shared:
            segments.append((begin, begin + shared, 0, 0, end))
        at += shared
        last = np.array(prompt[-1:])
        for row in members:
            length = starts[row + 1] - starts[row]
            ids += [last, values[starts[row] : starts[row + 1] - 1]]
            positions.append(order[shared : shared + length])
            gather.append(at + order[:length])
            segments.append((at, at + length, begin, begin + shared, at + length))
            at += length
    in_order = [row for members in bundles.values() for row in members]
    flat, places, where = (
        torch.from_numpy(np.concatenate(parts)) for parts in (ids, positions, gather)
    )
    return MicroBatch(in_order, flat[None], places[None], None, where, attend(segments))


def _bundles(batch: Batch, token_budget: int, width: int) -> list[list[int]]:
    """Rows with equal prompts, put together as long as sharing the prompt costs less than computing it again."""
    prompts = [tuple(p.tolist()) for p in batch.prompt.split()]
    lengths = batch.response.lengths.tolist()
    open_bundles: dict[tuple[int, ...], list[int]] = {}
    sizes: dict[tuple[int, ...], int] = {}
    out: list[list[int]] = []
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if length == 0:
            continue
        own = length - 1
        bundle, size = open_bundles.get(prompt), sizes.get(prompt, 0)
        if (
            bundle is not None
            and size + own <= token_budget
            and _sharing_pays(len(prompt), own, size, width)
        ):
            bundle.append(row)
            sizes[prompt] = size + own
        else:
            open_bundles[prompt] = [row]
            sizes[prompt] = len(prompt) + own
            out.append(open_bundles[prompt])
    return out


def _sharing_pays(prompt: int, own: int, size: int, width: int) -> bool:
    # Per token a block costs about 24 width^2 operations, per pair of tokens 4 width: one pair is worth 1/(6 width) tokens.
    # A bundle's mask is dense, a lone row's triangular.
    pair = 1.0 / (6 * width)
    added = own + pair * ((size + own) ** 2 - size**2)
    alone = (prompt + own) + pair * (prompt + own) ** 2 / 2
    return added < alone


def _join_units(
    bundles: list[list[int]], row_groups: Sequence[int] | None
) -> list[list[list[int]]]:
    if row_groups is None:
        return [[bundle] for bundle in bundles]
    parent: dict[int, int] = {}

    def root(unit: int) -> int:
        while parent.setdefault(unit, unit) != unit:
            unit = parent[unit]
        return unit

    for bundle in bundles:
        for row in bundle[1:]:
            parent[root(row_groups[row])] = root(row_groups[bundle[0]])
    joined: dict[int, list[list[int]]] = {}
    for bundle in bundles:
        joined.setdefault(root(row_groups[bundle[0]]), []).append(bundle)
    return list(joined.values())


def _length(batch: Batch, bundle: list[int]) -> int:
    prompt = int(batch.prompt.lengths[bundle[0]])
    return prompt + sum(int(batch.response.lengths[row]) - 1 for row in bundle)


def _assemble(batch: Batch, bundles: list[list[int]]) -> MicroBatch:
    """Lay the bundles out as padded rows. The last response token is never an input: nothing is predicted from it."""
    width = max(_length(batch, bundle) for bundle in bundles)
    ids = torch.zeros(len(bundles), width, dtype=torch.int64)
    positions = torch.zeros(len(bundles), width, dtype=torch.int64)
    part = torch.full(
        (len(bundles), width), -1, dtype=torch.int64
    )  # -1 padding, 0 prompt, i the i-th response
    prompt_starts, response_starts = batch.prompt.offsets, batch.response.offsets
    gather: list[Tensor] = []
    for b, bundle in enumerate(bundles):
        start, p = int(prompt_starts[bundle[0]]), int(batch.prompt.lengths[bundle[0]])
        ids[b, :p] = batch.prompt.values[start : start + p]
        positions[b, :p] = torch.arange(p)
        part[b, :p] = 0
        at = p
        for i, row in enumerate(bundle, start=1):
            n = int(batch.response.lengths[row]) - 1
            begin = int(response_starts[row])
            ids[b, at : at + n] = batch.response.values[begin : begin + n]
            positions[b, at : at + n] = torch.arange(p, p + n)
            part[b, at : at + n] = i
            gather.append(b * width + torch.cat([torch.tensor([p - 1]), torch.arange(at, at + n)]))
            at += n
    rows = [row for bundle in bundles for row in bundle]
    shared = any(len(bundle) > 1 for bundle in bundles)
    return MicroBatch(
        rows, ids, positions, _bundle_mask(part) if shared else None, torch.cat(gather)
    )


def _bundle_mask(part: Tensor) -> Tensor:
    width = part.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    visible = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    return (visible & causal)[:, None]
