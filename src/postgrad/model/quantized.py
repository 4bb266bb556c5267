"""4-bit base weights (NF4 of QLoRA): linear layers that are frozen and dequantized where they run.

Each block of 64 weights along a row has one float32 scale, its largest absolute value. A weight is
stored as the number of the nearest of 16 levels, two per byte: 4.5 bits per weight in all. The
codes are those of bitsandbytes without double quantization. Training and decoding multiply by the
same dequantized matrix; it exists only during the product.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from postgrad.errors import Unsupported
from postgrad.model.device import supports_triton

BLOCK = 64  # weights per scale
# Levels of NF4 from the appendix of the QLoRA paper: quantiles of a normal distribution.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class QuantizedWeight:
    """An (out, in) matrix in 4 bits per weight.

    `codes` is (out, in / 2) uint8; the upper half of a byte is the earlier weight. `scales` is
    (out, in / 64) float32. `dtype` is the type that dequantize() returns.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes
        self.scales = scales
        self.dtype = dtype
        self.shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Return the matrix in `dtype`, a new tensor."""
        if supports_triton(self.codes.device):
            from postgrad.model.kernels.dequantize import dequantize

            return dequantize(self.codes, self.scales, levels(self.codes.device), self.dtype)
        return dequantize_reference(self)


@torch.no_grad()
def quantize(weight: Tensor) -> QuantizedWeight:
    """Return the matrix (out, in) in 4 bits; `in` is a multiple of 64."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    # A block of zeros has scale 0; any divisor gives the code of level 0.
    relative = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    table = levels(weight.device)
    boundaries = (table[1:] + table[:-1]) / 2
    numbers = torch.bucketize(relative, boundaries).to(torch.uint8).flatten(1)
    codes = (numbers[:, ::2] << 4) | numbers[:, 1::2]
    return QuantizedWeight(codes, scales, weight.dtype)


def dequantize_reference(weight: QuantizedWeight) -> Tensor:
    """Return the dequantized matrix by torch operations, on any device."""
    table = levels(weight.codes.device)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # (256, 2), by byte
    values = embedding(weight.codes.int(), pairs).flatten(1)
    scaled = values.unflatten(1, (-1, BLOCK)) * weight.scales[..., None]
    return scaled.flatten(1).to(weight.dtype)


@cache
def levels(device: torch.device) -> Tensor:
    """Return the (16,) float32 levels on the device."""
    return torch.tensor(LEVELS, device=device)


# ---- products


class _QuantizedLinear(torch.autograd.Function):
    """x @ W.T + bias of a frozen W, which the backward pass dequantizes again; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return linear(x, weight.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = grads[0]
        dx = grad @ ctx.weight.dequantize() if ctx.needs_input_grad[0] else None
        db = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias; differentiable in x and bias."""
    return _QuantizedLinear.apply(x, weight, bias)  # type: ignore[return-value]


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    """Return the matrix itself, or a dequantized copy of it."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one matrix with the rows of all."""
    codes = torch.cat([weight.codes for weight in weights])
    scales = torch.cat([weight.scales for weight in weights])
    return QuantizedWeight(codes, scales, weights[0].dtype)


def split_rows(weight: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """Return the parts of a concatenated matrix; they share its memory."""
    codes = weight.codes.split(sizes)
    scales = weight.scales.split(sizes)
    pairs = zip(codes, scales, strict=True)
    return [QuantizedWeight(part, scale, weight.dtype) for part, scale in pairs]


# ---- layers


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen 4-bit weight. `weight` is a new dequantized matrix."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the full weight
        self.out_features, self.in_features = quantized.shape
        self.quantized = quantized
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.dequantize()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return quantized_linear(x, self.quantized, self.bias)


def quantized_modules(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the 4-bit layers of the model, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def quantize_linears(model: Any, device: torch.device) -> None:
    """Replace all linear layers except the head by frozen 4-bit ones on the device.

    Layers go to the device one by one, so it never holds the full model.

    Raises: ConfigError for models with weights that cannot be quantized.
    """
    _check_matrices(model)
    for parent, name, module in _linears(model):
        quantized = quantize(module.weight.to(device))
        setattr(parent, name, QuantizedLinear(quantized, module.bias).requires_grad_(False))


def _linears(model: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return all linear layers except the head, each with its parent and its name there."""
    head = model.get_output_embeddings()
    found: list[tuple[nn.Module, str, nn.Linear]] = []
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) is nn.Linear and module is not head:
                found.append((parent, name, module))
    return found


def _check_matrices(model: Any) -> None:
    """Refuse matrices that are no linear layers, and rows that are no whole blocks."""
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    known = {id(module.weight) for module in linears.values()}
    known |= {id(model.get_input_embeddings().weight), id(head.weight)}
    for name, p in model.named_parameters():
        if p.dim() > 1 and id(p) not in known:
            raise Unsupported(
                f"model.quantization=4bit: {name} is not the weight of a linear layer and would "
                "stay in 16 bits; use model.quantization=none"
            )
    for name, module in linears.items():
        if module.in_features % BLOCK and module is not head:
            raise Unsupported(
                f"model.quantization=4bit: {name} has {module.in_features} inputs, which is no "
                f"multiple of {BLOCK}; use model.quantization=none"
            )
