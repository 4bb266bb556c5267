"""Pictures in a model's passes: what the stock vision tower sees, in the places of image tokens.

A pass with pictures has the tower's features where its ids have image tokens, and token embeddings
elsewhere; then it is a pass of the stock language model like any other. Three things depend on the
family, and all come from the stock model: rotary positions of three axes (Qwen), features that are
added after the first blocks (Qwen3), and image tokens that attend to each other in both directions
(Gemma 3). The numeric gate holds the result against the stock forward pass (load/picture_gate.py).
"""

import hashlib
import inspect
import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from postgrad import picture_processor
from postgrad.errors import RunError
from postgrad.model.device import copy_async
from postgrad.model.passes.packing import RowSpan
from postgrad.picture_processor import PictureProcessor
from postgrad.pictures import Picture
from postgrad.types import Batch

KEPT_PIXEL_BYTES = 1 << 30  # of the pixels that stay in memory between their uses
KEPT_FEATURE_BYTES = 2 << 30  # of a frozen tower
SIZES = ((48, 32), (32, 48), (48, 32))  # of the gate's pictures; two have equally many tokens

Pictures = tuple[Picture, ...]


class Features(NamedTuple):
    """What a tower makes of pictures; each tensor has one line per image token."""

    embeddings: Tensor  # (places, width)
    deep: tuple[Tensor, ...]  # added to the states after each of the first blocks

    @property
    def layers(self) -> list[Tensor]:
        return [self.embeddings, *self.deep]


class Part(NamedTuple):
    """Consecutive image tokens of one row, which has `total` of them, from `first` on."""

    pictures: Pictures
    first: int
    length: int
    total: int


@dataclass(frozen=True)
class PlacedPictures:
    """The pictures of one pass.

    Attributes:
        parts: which features the places get, in order; a prompt that rows share is there once.
        places: (image tokens,) where they are in the pass's flattened ids.
        axes: (4, tokens) positions in the row and on three rotary axes; None with one axis.
        blocks: (tokens,) the number of the picture that a token belongs to, 0 for text; None where
            image tokens attend to earlier tokens only.
    """

    parts: list[Part]
    places: Tensor
    axes: Tensor | None
    blocks: Tensor | None

    def to(self, device: torch.device) -> "PlacedPictures":
        axes = None if self.axes is None else copy_async(self.axes, device)
        return PlacedPictures(self.parts, copy_async(self.places, device), axes, self.blocks)


class RowPictures(NamedTuple):
    """The pictures of a row's first tokens; see PlacedPictures. `is_place` is (tokens,) bool."""

    pictures: Pictures
    is_place: Tensor
    axes: Tensor | None
    blocks: Tensor | None
    offset: int  # what a rotary position of later text has more than its position in the row

    def axes_between(self, first: int, end: int) -> Tensor:
        """Return (4, end - first) axes of some tokens of the row; text follows the known ones."""
        assert self.axes is not None
        text = torch.arange(max(first, len(self.is_place)), max(end, len(self.is_place)))
        later = torch.stack([text, *[text + self.offset] * 3])
        return torch.cat([self.axes[:, first:end], later], 1)


class Vision:
    """How a model sees pictures; `support.vision_of(model)` returns it.

    `passes` is the kind of passes with pictures that the gate has chosen. `is_shared` says that
    ranks sum their gradients: then a trained tower takes part in every pass of a rank.
    """

    def __init__(self, model: Any, processor: PictureProcessor, trained: bool) -> None:
        self.processor = processor
        self.trained = trained
        self.passes: Literal["packed", "shared", "rows"] = "packed"
        self.is_shared = False
        self.unused = noise(0, SIZES[0])  # what the tower reads in a pass without pictures
        settings = json.dumps(processor.stock.image_processor.to_dict(), default=str).encode()
        sources = [Path(__file__).read_bytes(), Path(picture_processor.__file__).read_bytes()]
        # of what the verdicts about pictures depend on besides the model
        self.fingerprint = hashlib.sha256(b"".join([settings, *sources])).hexdigest()[:8]
        self.has_axes = hasattr(model.base_model, "get_rope_index")
        parameters = inspect.signature(model.base_model.forward).parameters
        self.sees_both_ways = "token_type_ids" in parameters
        self.inputs = set(inspect.signature(model.base_model.get_image_features).parameters)
        self.kept_pixels: dict[Picture, dict[str, Tensor]] = {}  # the oldest first
        self.kept: dict[Picture, Features] = {}  # of a frozen tower, the oldest first

    def pixels(self, picture: Picture) -> dict[str, Tensor]:
        """Return what the tower reads of a picture."""
        if picture not in self.kept_pixels:
            pixels = self.processor.pixels([picture])
            size = sum(value.nbytes for value in pixels.values() if isinstance(value, Tensor))
            _make_room(self.kept_pixels, size, KEPT_PIXEL_BYTES)
            self.kept_pixels[picture] = pixels
        return self.kept_pixels[picture]

    # ---- the tower

    def features(self, model: Any, pictures: Iterable[Picture]) -> dict[Picture, Features]:
        """Return the features of pictures. Those of a frozen tower are computed once.

        A frozen tower computes one picture at a time, so that the values depend on no other.
        """
        if self.trained:
            return self._compute(model, pictures)
        found: dict[Picture, Features] = {}
        for picture in pictures:
            if picture not in self.kept:
                with torch.no_grad():
                    (features,) = self._compute(model, [picture]).values()
                size = picture.num_bytes + sum(layer.nbytes for layer in features.layers)
                _make_room(self.kept, size, KEPT_FEATURE_BYTES)
                self.kept[picture] = features
            found[picture] = self.kept[picture]
        return found

    def _compute(self, model: Any, pictures: Iterable[Picture]) -> dict[Picture, Features]:
        device = model.get_input_embeddings().weight.device
        groups: dict[Any, list[Picture]] = {}  # of pictures that the tower reads at once
        for picture in pictures:
            pixels = self._tower_inputs(picture)
            shapes = tuple(value.shape[1:] for value in pixels.values())
            groups.setdefault(shapes, []).append(picture)
        found: dict[Picture, Features] = {}
        for group in groups.values():
            inputs = [self._tower_inputs(picture) for picture in group]
            joined = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
            joined = {name: value.to(device) for name, value in joined.items()}
            output = model.base_model.get_image_features(**joined, return_dict=True)
            deep = getattr(output, "deepstack_features", None) or ()
            counts = [self.processor.num_tokens([picture]) for picture in group]
            layers = [_lines(layer).split(counts) for layer in (output.pooler_output, *deep)]
            for picture, (embeddings, *others) in zip(
                group, zip(*layers, strict=True), strict=True
            ):
                found[picture] = Features(embeddings, tuple(others))
        return found

    def _tower_inputs(self, picture: Picture) -> dict[str, Tensor]:
        pixels = self.pixels(picture).items()
        return {n: v for n, v in pixels if n in self.inputs and isinstance(v, Tensor)}

    # ---- where pictures are

    def read_row(self, model: Any, tokens: Tensor, pictures: Pictures) -> RowPictures:
        """Return where the pictures of a row are.

        Image tokens after those of the pictures were sampled by a policy: they show nothing.
        """
        is_place = tokens == self.processor.image_token_id
        num_places = self.processor.num_tokens(pictures) if pictures else 0
        is_place &= is_place.cumsum(0) <= num_places
        if int(is_place.sum()) != num_places:
            raise RunError(
                f"a row has {int(is_place.sum())} image tokens, and its {len(pictures)} pictures "
                f"need {num_places}; encode it with the model's own processor"
            )
        axes = self._axes(model, tokens, pictures, is_place) if self.has_axes else None
        blocks = _number_runs(is_place) if self.sees_both_ways else None
        offset = 0 if axes is None else int(axes[1:].max()) + 1 - len(tokens)
        return RowPictures(tuple(pictures), is_place, axes, blocks, offset)

    def _axes(self, model: Any, tokens: Tensor, pictures: Pictures, is_place: Tensor) -> Tensor:
        positions = torch.arange(len(tokens))
        if not pictures:
            return positions.expand(4, -1)
        grids = torch.cat([self.pixels(picture)["image_grid_thw"] for picture in pictures])
        rotary, _ = model.base_model.get_rope_index(
            input_ids=tokens[None], mm_token_type_ids=is_place[None].int(), image_grid_thw=grids
        )
        return torch.cat([positions[None], rotary[:, 0]])

    def place(
        self, model: Any, batch: Batch, spans: Sequence[RowSpan], size: int
    ) -> PlacedPictures:
        """Return the pictures of a pass that lays out rows of a batch in these spans."""
        prompts = batch.prompt.split()
        responses = batch.response.split()
        rows: dict[int, RowPictures] = {}
        of_prompts: dict[tuple[Any, ...], RowPictures] = {}  # which the rows of a group share
        for row in {span.row for span in spans}:
            prompt, response = prompts[row], responses[row]
            pictures = tuple(batch.rows["images"][row])
            num_places = int((prompt == self.processor.image_token_id).sum())
            if num_places < self.processor.num_tokens(pictures):  # the others are in the response
                rows[row] = self.read_row(model, torch.cat([prompt, response]), pictures)
                continue
            key = (*prompt.tolist(), *pictures)
            if key not in of_prompts:
                of_prompts[key] = self.read_row(model, prompt, pictures)
            rows[row] = of_prompts[key]
        return self.join(spans, rows, size)

    def place_spans(
        self,
        model: Any,
        spans: Sequence[RowSpan],
        rows: Sequence[RowPictures | None],
        size: int,
    ) -> PlacedPictures:
        """Return the pictures of a pass of `size` tokens; `rows` has those of each span's row."""
        text = self.read_row(model, torch.zeros(1, dtype=torch.int64), ())
        placed = {span.row: row or text for span, row in zip(spans, rows, strict=True)}
        return self.join(spans, placed, size)

    def join(
        self, spans: Sequence[RowSpan], rows: Mapping[int, RowPictures], size: int
    ) -> PlacedPictures:
        """Return the pictures of a pass of `size` tokens from those of its rows."""
        axes = torch.zeros(4, size, dtype=torch.int64) if self.has_axes else None
        blocks = torch.zeros(size, dtype=torch.int64) if self.sees_both_ways else None
        parts: list[Part] = []
        places: list[Tensor] = []
        for start, end, number, first in spans:
            row = rows[number]
            last = first + end - start
            here = slice(first, last)
            found = torch.nonzero(row.is_place[here])[:, 0]
            if len(found):
                num_before = int(row.is_place[:first].sum())
                parts.append(Part(row.pictures, num_before, len(found), int(row.is_place.sum())))
                places.append(found + start)
            if axes is not None:
                axes[:, start:end] = row.axes_between(first, last)
            if blocks is not None and row.blocks is not None:
                own = row.blocks[here]  # rows of a bundle have pictures of equal numbers
                blocks[start : start + len(own)] = own + (own > 0) * (number << 32)
        flat = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
        return PlacedPictures(parts, flat, axes, blocks)

    def stock_inputs(self, model: Any, ids: Tensor, pictures: Pictures) -> dict[str, Tensor]:
        """Return what the stock model reads besides equal rows of ids (rows, tokens)."""
        known = inspect.signature(model.forward).parameters
        types = (ids == self.processor.image_token_id).int()
        if int(types.sum(1).max()) > self.processor.num_tokens(pictures):
            raise RunError(
                "an earlier turn of the policy has an image token, which the stock model cannot "
                "tell from a picture; the native engine can: rollout.engine=native"
            )
        inputs = {"mm_token_type_ids": types, "token_type_ids": types}
        for name, value in self.processor.pixels(pictures).items():
            if name in known:
                inputs[name] = value.repeat(len(ids), *[1] * (value.dim() - 1)).to(ids.device)
        return {name: value for name, value in inputs.items() if name in known}

    # ---- passes

    def language_inputs(self, model: Any, ids: Tensor, placed: PlacedPictures) -> dict[str, Any]:
        """Return what the stock language model gets in place of `ids` (bundles, length)."""
        is_place = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
        is_place[placed.places] = True
        is_place = is_place.view(ids.shape)
        embeddings = model.get_input_embeddings()(ids.masked_fill(is_place, 0))
        inputs: dict[str, Any] = {}
        if placed.axes is not None:
            inputs["position_ids"] = placed.axes.view(4, *ids.shape)
        features: Features | None = None
        if placed.parts:
            features = self._features_of(model, placed.parts)
            values = features.embeddings.to(embeddings.dtype)
            flat = embeddings.flatten(0, 1).index_copy(0, placed.places, values)
            embeddings = flat.view_as(embeddings)
            if features.deep:
                inputs["visual_pos_masks"] = is_place
                inputs["deepstack_visual_embeds"] = list(features.deep)
        if self.is_shared and self.trained and torch.is_grad_enabled():
            features = features or self._compute(model, [self.unused])[self.unused]
            embeddings = embeddings + 0 * sum(layer[0, 0] for layer in features.layers)
        return inputs | {"inputs_embeds": embeddings}

    def _features_of(self, model: Any, parts: Sequence[Part]) -> Features:
        """Return the features of all places of a pass; each picture is computed once."""
        shown = dict.fromkeys(picture for part in parts for picture in part.pictures)
        by_picture = self.features(model, shown)
        layers: list[list[Tensor]] = []
        for pictures, first, length, total in parts:
            found = [by_picture[picture] for picture in pictures]
            joined = [torch.cat(layer) for layer in zip(*(f.layers for f in found), strict=True)]
            if len(joined[0]) != total:
                raise RunError(
                    f"{len(pictures)} pictures have {total} image tokens and {len(joined[0])} "
                    "features; use the processor files of this model"
                )
            layers.append([layer[first : first + length] for layer in joined])
        embeddings, *deep = [torch.cat(layer) for layer in zip(*layers, strict=True)]
        return Features(embeddings, tuple(deep))


def noise(seed: int, size: tuple[int, int]) -> Picture:
    """Return a picture of random colors."""
    from PIL import Image

    width, height = size
    image = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * width * height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(file.getvalue())


def _lines(features: Any) -> Tensor:
    """Return features (places, width) of a tensor, or of several in a tuple."""
    parts = features if isinstance(features, tuple | list) else [features]
    return torch.cat([part.flatten(0, -2) for part in parts])


def _make_room(kept: dict[Picture, Any], size: int, max_bytes: int) -> None:
    """Drop the oldest entries until one more of about their size fits."""
    while kept and size * (len(kept) + 1) > max_bytes:
        del kept[next(iter(kept))]


def _number_runs(is_place: Tensor) -> Tensor:
    """Return the number of the run of places that a token belongs to, 0 for others."""
    numbers: list[int] = []
    number = 0
    for found, run in groupby(is_place.tolist()):
        number += found
        numbers += [number if found else 0] * len(list(run))
    return torch.tensor(numbers)
