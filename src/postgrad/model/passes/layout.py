"""How rows are laid out for forward passes: micro-batches of bundles within a token budget.

A bundle is one prompt with one or more of the responses sampled from it. The prompt is computed
once; each response attends to the prompt and to itself. Padded micro-batches sort bundles by
length and pad them to the longest. Packed micro-batches need no padding. The layout changes how
much is computed; results change by rounding only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from postgrad.model.device import copy_async, has_own_memory, supports_triton
from postgrad.model.load.context import check_token_id
from postgrad.model.passes.attention import with_blocks
from postgrad.model.passes.packing import Packing, RowSpan, Segment, make_packing
from postgrad.model.passes.row_attention import PaddedSegments, make_padded_segments
from postgrad.model.passes.sequence import AnyPacking
from postgrad.model.passes.support import PassKind, support_of, vision_of
from postgrad.types import Batch

if TYPE_CHECKING:  # imported by runs with pictures
    from postgrad.model.vision import PlacedPictures

Bundle = list[int]  # row numbers
EAGER_GPU_TOKENS = 16_384  # per pass on a GPU that launches kernels one by one
MakePacking = Callable[[list[Segment]], Packing | PaddedSegments]


class Prompt(NamedTuple):
    """What the rows that share a prompt have in common."""

    ids: tuple[int, ...]
    pictures: tuple[str, ...] = ()  # their keys


Place = Callable[[list[RowSpan], int], "PlacedPictures"]  # of a pass of so many tokens


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass.

    `hidden.flatten(0, 1)[gather]` are the states that predict the response tokens of `rows`, in
    order.
    """

    rows: list[int]
    ids: Tensor  # (bundles, length)
    positions: Tensor  # (bundles, length)
    mask: Tensor | None  # (bundles, 1, length, length) bool; None: plain causal
    gather: Tensor  # (response tokens of rows,)
    packing: AnyPacking | None = None  # for one row of packed tokens
    stock: bool = False  # one trajectory per row, through the stock forward pass
    pictures: "PlacedPictures | None" = None

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            self.rows,
            copy_async(self.ids, device),
            copy_async(self.positions, device),
            None if self.mask is None else copy_async(self.mask, device),
            copy_async(self.gather, device),
            None if self.packing is None else self.packing.to(device),
            self.stock,
            None if self.pictures is None else self.pictures.to(device),
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens with padding, which the token budget limits."""
        return self.ids.numel()


def make_micro_batches(
    batch: Batch,
    token_budget: int,
    model: Any,
    row_groups: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Return micro-batches of the kind that the model supports, covering every row once.

    `device` is where the passes run; by default the device of the model's parameters. Raises
    RunError for token ids without an embedding.
    """
    kind = passes_of(model, batch)
    for ids in (batch.prompt.values, batch.response.values):
        if len(ids):
            check_token_id(int(ids.max()), model.config)
    return make_micro_batches_of_kind(kind, batch, token_budget, model, row_groups, device)


def passes_of(model: Any, batch: Batch) -> PassKind:
    """Return the kind of passes over a batch. Raises ConfigError if none can read its pictures."""
    if "images" not in batch.rows:
        return support_of(model).passes
    return vision_of(model).passes


def make_micro_batches_of_kind(
    kind: PassKind,
    batch: Batch,
    token_budget: int,
    model: Any,
    row_groups: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Return micro-batches of one kind (see passes/support.py).

    Packed ones need Triton or a CPU; on other devices they are padded with shared prompts.
    """
    if device is None:
        device = next(model.parameters()).device
    assert device is not None
    budget = token_budget or default_token_budget(device)
    place: Place | None = None
    if "images" in batch.rows:
        place = partial(vision_of(model).place, model, batch)
    if kind == "packed" and supports_triton(device):
        return make_packed_micro_batches(batch, budget, row_groups, make_packing, place)
    if kind == "packed" and device.type == "cpu":
        return make_packed_micro_batches(batch, budget, row_groups, make_padded_segments, place)
    width = int(model.config.get_text_config().hidden_size)
    return make_padded_micro_batches(batch, budget, width, row_groups, kind != "rows", place)


def default_token_budget(device: torch.device, eager: bool = False) -> int:
    """Return the tokens per pass that training.token_budget=0 means.

    A GPU gets more where its passes are `eager`, launched kernel by kernel instead of as a graph.
    """
    return EAGER_GPU_TOKENS if eager and has_own_memory(device) else 8192


def supports_packing(model: Any) -> bool:
    """Return whether the model's passes are packed (see passes/support.py)."""
    return support_of(model).passes == "packed"


# ---- padded micro-batches


def make_padded_micro_batches(
    batch: Batch,
    token_budget: int,
    width: int,
    row_groups: Sequence[int] | None = None,
    share: bool = True,
    place: Place | None = None,
) -> list[MicroBatch]:
    """Return padded micro-batches that cover every row with a response once.

    `width` is the model's hidden size; it weighs the cost of attention against the rest.
    `row_groups` has one number per row. Rows with equal numbers, such as the two sides of a
    preference pair, are placed in the same micro-batch. Without `share` each row is alone, for the
    stock forward pass.
    """
    if share:
        bundles = _make_bundles(batch, token_budget, width)
    else:
        lengths = batch.response.lengths.tolist()
        bundles = [[row] for row, length in enumerate(lengths) if length]
    units = _join_by_row_group(bundles, row_groups)
    unit_lengths = [max(_bundle_length(batch, bundle) for bundle in unit) for unit in units]
    order = sorted(range(len(units)), key=lambda i: -unit_lengths[i])
    micro_batches: list[MicroBatch] = []
    current: list[Bundle] = []
    longest = 0
    for index in order:
        unit = units[index]
        padded_length = max(longest, unit_lengths[index])
        if current and padded_length * (len(current) + len(unit)) > token_budget:
            micro_batches.append(_pad_bundles(batch, current, not share, place))
            current = []
            longest = 0
        current.extend(unit)
        longest = max(longest, unit_lengths[index])
    if current:
        micro_batches.append(_pad_bundles(batch, current, not share, place))
    return micro_batches


def _make_bundles(batch: Batch, token_budget: int, width: int) -> list[Bundle]:
    """Group rows with equal prompts where sharing the prompt costs less than recomputing it."""
    prompts = prompts_of(batch)
    open_bundles: dict[Prompt, Bundle] = {}
    sizes: dict[Prompt, int] = {}
    bundles: list[Bundle] = []
    for row, length in enumerate(batch.response.lengths.tolist()):
        if length == 0:
            continue
        prompt = prompts[row]
        own = length - 1
        size = sizes.get(prompt, 0)
        fits = prompt in open_bundles and size + own <= token_budget
        if fits and _sharing_is_cheaper(len(prompt.ids), own, size, width):
            open_bundles[prompt].append(row)
            sizes[prompt] = size + own
        else:
            open_bundles[prompt] = [row]
            sizes[prompt] = len(prompt.ids) + own
            bundles.append(open_bundles[prompt])
    return bundles


def _sharing_is_cheaper(prompt: int, own: int, size: int, width: int) -> bool:
    """Compare the cost of adding a row to a bundle of `size` tokens with that of a row alone.

    A block costs about 24 · width² operations per token and 4 · width per pair of tokens: one pair
    is worth 1 / (6 · width) tokens. A bundle's mask is dense; that of a lone row is triangular.
    """
    pair = 1.0 / (6 * width)
    added = own + pair * ((size + own) ** 2 - size**2)
    alone = (prompt + own) + pair * (prompt + own) ** 2 / 2
    return added < alone


def _join_by_row_group(
    bundles: list[Bundle], row_groups: Sequence[int] | None
) -> list[list[Bundle]]:
    """Join bundles that hold rows of the same row group (a union-find over the groups)."""
    if row_groups is None:
        return [[bundle] for bundle in bundles]
    parent: dict[int, int] = {}

    def root(group: int) -> int:
        while parent.setdefault(group, group) != group:
            group = parent[group]
        return group

    for bundle in bundles:
        for row in bundle[1:]:
            parent[root(row_groups[row])] = root(row_groups[bundle[0]])
    units: dict[int, list[Bundle]] = {}
    for bundle in bundles:
        units.setdefault(root(row_groups[bundle[0]]), []).append(bundle)
    return list(units.values())


def _bundle_length(batch: Batch, bundle: Bundle) -> int:
    prompt = int(batch.prompt.lengths[bundle[0]])
    return prompt + sum(int(batch.response.lengths[row]) - 1 for row in bundle)


def _pad_bundles(
    batch: Batch, bundles: list[Bundle], stock: bool, place: Place | None
) -> MicroBatch:
    """Lay the bundles out as padded rows.

    The last response token is never an input, because nothing is predicted from it.
    """
    width = max(_bundle_length(batch, bundle) for bundle in bundles)
    ids = torch.zeros(len(bundles), width, dtype=torch.int64)
    positions = torch.zeros(len(bundles), width, dtype=torch.int64)
    # -1: padding, 0: prompt, i: the i-th response
    part = torch.full((len(bundles), width), -1, dtype=torch.int64)
    gather: list[Tensor] = []
    spans: list[RowSpan] = []
    for b, bundle in enumerate(bundles):
        prompt_start = int(batch.prompt.offsets[bundle[0]])
        prompt = int(batch.prompt.lengths[bundle[0]])
        ids[b, :prompt] = batch.prompt.values[prompt_start : prompt_start + prompt]
        positions[b, :prompt] = torch.arange(prompt)
        part[b, :prompt] = 0
        spans.append(RowSpan(b * width, b * width + prompt, bundle[0], 0))
        begin = prompt
        for i, row in enumerate(bundle, start=1):
            num_inputs = int(batch.response.lengths[row]) - 1
            end = begin + num_inputs
            start = int(batch.response.offsets[row])
            ids[b, begin:end] = batch.response.values[start : start + num_inputs]
            positions[b, begin:end] = torch.arange(prompt, prompt + num_inputs)
            part[b, begin:end] = i
            predictors = torch.cat([torch.tensor([prompt - 1]), torch.arange(begin, end)])
            gather.append(b * width + predictors)
            spans.append(RowSpan(b * width + begin, b * width + end, row, prompt))
            begin = end
    rows = [row for bundle in bundles for row in bundle]
    is_shared = any(len(bundle) > 1 for bundle in bundles)
    mask = _bundle_mask(part) if is_shared else None
    pictures = None if place is None else place(spans, ids.numel())
    if pictures is not None and pictures.blocks is not None:
        mask = with_blocks(mask, pictures.blocks.view(ids.shape))
    gathered = torch.cat(gather)
    return MicroBatch(rows, ids, positions, mask, gathered, stock=stock, pictures=pictures)


def _bundle_mask(part: Tensor) -> Tensor:
    width = part.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    visible = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    return (visible & causal)[:, None]


# ---- packed micro-batches


def make_packed_micro_batches(
    batch: Batch,
    token_budget: int,
    row_groups: Sequence[int] | None = None,
    make: MakePacking = make_packing,
    place: Place | None = None,
) -> list[MicroBatch]:
    """Return packed micro-batches: no padding, and each prompt once per pass.

    The shared part of a bundle is the prompt without its last token. Each row's own part begins
    with that token, so its n inputs predict its n response tokens.
    """
    prompts = prompts_of(batch)
    prompt_lengths = batch.prompt.lengths.tolist()
    lengths = batch.response.lengths.tolist()
    passes = plan_packed(prompts, prompt_lengths, lengths, token_budget, row_groups)
    return [_pack(batch, rows, prompts, make, place) for rows in passes]


def plan_packed(
    prompts: Sequence[Any],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    token_budget: int,
    row_groups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the rows of each packed pass. The estimate of memory plans with it as well.

    Args:
        prompts: one value per row, of any type that sorts; rows with equal ones share the prompt.
        prompt_lengths: tokens of each row's prompt.
        lengths: tokens of each row's response; rows without any are in no pass.
        token_budget: tokens of one pass, at most, unless one unit of rows is longer.
        row_groups: rows with equal numbers are in the same pass.
    """
    units: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            group = row if row_groups is None else row_groups[row]
            units.setdefault(group, []).append(row)
    passes: list[list[int]] = []
    shared: set[Any] = set()  # the prompts of the last pass
    total = 0
    for unit in sorted(units.values(), key=lambda unit: prompts[unit[0]]):
        own = sum(lengths[row] for row in unit)
        in_unit = {prompts[row]: prompt_lengths[row] - 1 for row in unit}
        added = own + sum(length for prompt, length in in_unit.items() if prompt not in shared)
        if not passes or total + added > token_budget:
            passes.append([])
            shared = set()
            total = 0
            added = own + sum(in_unit.values())
        passes[-1] += unit
        shared |= in_unit.keys()
        total += added
    return passes


def prompts_of(batch: Batch) -> list[Prompt]:
    """Return what each row shares with the other rows of its prompt."""
    prompts = [tuple(prompt.tolist()) for prompt in batch.prompt.split()]
    if "images" not in batch.rows:
        return [Prompt(ids) for ids in prompts]
    keys = [tuple(picture.key for picture in shown) for shown in batch.rows["images"]]
    return [Prompt(*pair) for pair in zip(prompts, keys, strict=True)]


def _pack(
    batch: Batch,
    rows: list[int],
    prompts: list[Prompt],
    make: MakePacking,
    place: Place | None,
) -> MicroBatch:
    bundles: dict[Prompt, Bundle] = {}
    for row in rows:
        bundles.setdefault(prompts[row], []).append(row)
    offsets = batch.response.offsets.tolist()
    values = batch.response.values.numpy()
    lengths = {row: offsets[row + 1] - offsets[row] for row in rows}
    longest = max(len(prompts[row].ids) + lengths[row] for row in rows)
    index = np.arange(longest)
    ids: list[Any] = []
    positions: list[Any] = []
    gather: list[Any] = []
    segments: list[Segment] = []
    spans: list[RowSpan] = []
    begin = 0  # where the next segment begins
    for (prompt, _), bundle in bundles.items():
        shared = len(prompt) - 1
        shared_start = begin
        shared_end = begin + shared
        bundle_end = shared_end + sum(lengths[row] for row in bundle)
        ids.append(np.array(prompt[:-1], dtype=np.int64))
        positions.append(index[:shared])
        if shared:
            segments.append((shared_start, shared_end, 0, 0, bundle_end))
            spans.append(RowSpan(shared_start, shared_end, bundle[0], 0))
        begin = shared_end
        last_prompt_token = np.array(prompt[-1:])
        for row in bundle:
            length = lengths[row]
            end = begin + length
            ids += [last_prompt_token, values[offsets[row] : offsets[row + 1] - 1]]
            positions.append(index[shared : shared + length])
            gather.append(begin + index[:length])
            segments.append((begin, end, shared_start, shared_end, end))
            spans.append(RowSpan(begin, end, row, shared))
            begin = end
    return MicroBatch(
        rows=[row for bundle in bundles.values() for row in bundle],
        ids=torch.from_numpy(np.concatenate(ids))[None],
        positions=torch.from_numpy(np.concatenate(positions))[None],
        mask=None,
        gather=torch.from_numpy(np.concatenate(gather)),
        packing=make(segments),
        pictures=None if place is None else place(spans, begin),
    )
