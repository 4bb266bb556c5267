"""AdamW whose two moments are kept in 8 bits: 2 bytes per weight instead of 8.

Each block of 256 values has one float32 scale, its largest absolute value. A value is stored as the
number of the nearest of 256 levels between -1 and 1 (0 and 1 for squares), which are dense near 0:
the dynamic quantization of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021).
An update dequantizes a slice of a parameter, computes AdamW in float32 and quantizes again, so the
working memory is that of a slice. Small parameters keep float32 moments.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from postgrad.model.optimizers.offload import MOMENTS, adamw_update

BLOCK = 256  # values per scale
MIN_ELEMENTS = 4096  # smaller parameters, such as norms, keep float32 moments
SLICE_ELEMENTS = 1 << 24  # updated at once; a multiple of BLOCK
NUM_DECADES = 7  # the smallest positive level is near 10^-7
CODES = "_codes"  # suffixes of the names of a moment's two tensors
SCALES = "_scales"


def dynamic_levels(signed: bool) -> Tensor:
    """Return the 256 sorted levels.

    Each decade below 1 has twice as many levels as the one below it, evenly spaced; 0 and 1 are
    levels too. Signed levels spend half of them on negative values.
    """
    positive: list[Tensor] = []
    for decade in range(NUM_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        centers = (edges[:-1] + edges[1:]) / 2
        positive.append(centers * 10.0 ** (decade - NUM_DECADES + 1))
    values = torch.cat(positive)
    levels = [values, torch.tensor([0.0, 1.0])]
    if signed:
        levels.append(-values)
    return torch.cat(levels).sort().values


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels and the boundaries between them on the device."""
    levels = dynamic_levels(signed).to(device)
    return levels, (levels[1:] + levels[:-1]) / 2


def quantize_blocks(values: Tensor, signed: bool, codes: Tensor, scales: Tensor) -> None:
    """Write values (elements,) as codes (elements,) uint8 and scales (blocks,)."""
    _, boundaries = _tables(signed, values.device)
    for part, code, scale in _blocks(values, codes, scales):
        scale.copy_(part.abs().amax(-1))
        relative = part / torch.where(scale == 0, 1.0, scale)[:, None]
        numbers = torch.bucketize(relative, boundaries)
        if not signed:
            # A square that becomes 0 would turn the next step into exp_avg / eps: it is rounded up.
            numbers = torch.where(relative > 0, numbers.clamp(min=1), numbers)
        code.copy_(numbers)


def dequantize_blocks(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the float32 values (elements,) of codes and scales."""
    levels, _ = _tables(signed, codes.device)
    values = levels[codes.int()]
    for part, _, scale in _blocks(values, codes, scales):
        part.mul_(scale[:, None])
    return values


def _blocks(values: Tensor, codes: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return views of whole blocks as (blocks, BLOCK), and of the rest as one shorter block."""
    count = len(values) // BLOCK
    end = count * BLOCK
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    if count:
        parts.append((values[:end].view(-1, BLOCK), codes[:end].view(-1, BLOCK), scales[:count]))
    if end < len(values):
        parts.append((values[end:][None], codes[end:][None], scales[count:]))
    return parts


class AdamW8bit(torch.optim.Optimizer):
    """AdamW for contiguous float32 parameters.

    `state[p]` holds `step` and, per moment, `exp_avg_codes` and `exp_avg_scales`, or `exp_avg` in
    float32 for small parameters. Parameters without a gradient are left alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; return the result of `closure`, if given."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p] = _new_state(p)
                self.state[p]["step"] += 1
                for start in range(0, p.numel(), SLICE_ELEMENTS):
                    _update_slice(group, p, self.state[p], start)
        return result


def _new_state(p: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    for name in MOMENTS:
        if p.numel() < MIN_ELEMENTS:
            state[name] = torch.zeros_like(p)
        else:
            num_blocks = -(-p.numel() // BLOCK)
            state[name + CODES] = torch.zeros(p.numel(), dtype=torch.uint8, device=p.device)
            state[name + SCALES] = torch.zeros(num_blocks, device=p.device)
    return state


def _update_slice(group: dict[str, Any], p: Tensor, state: dict[str, Tensor], start: int) -> None:
    """Apply AdamW to the elements from `start` on, at most SLICE_ELEMENTS of them."""
    elements = slice(start, min(start + SLICE_ELEMENTS, p.numel()))
    blocks = slice(start // BLOCK, -(-elements.stop // BLOCK))
    grad = p.grad
    assert grad is not None
    moments: list[Tensor] = []
    for name in MOMENTS:
        if name in state:
            moments.append(state[name].view(-1)[elements])
        else:
            codes, scales = state[name + CODES][elements], state[name + SCALES][blocks]
            moments.append(dequantize_blocks(codes, scales, signed=name == MOMENTS[0]))
    weights = p.view(-1)[elements]
    exp_avg, exp_avg_sq = moments
    adamw_update(group, weights, grad.reshape(-1)[elements], exp_avg, exp_avg_sq, state["step"])
    for name, moment in zip(MOMENTS, moments, strict=True):
        if name not in state:
            codes, scales = state[name + CODES][elements], state[name + SCALES][blocks]
            quantize_blocks(moment, name == MOMENTS[0], codes, scales)
