"""Bytes of a run by what holds them, and the optimizers' share of them."""

from dataclasses import dataclass

import torch

from postgrad.config.schema import Config
from postgrad.model.device import supports_state_streaming
from postgrad.model.optimizers import adamw_8bit
from postgrad.model.optimizers.offload import NUM_SLOTS, SLICE_ELEMENTS
from postgrad.sizing.simulate import ModelSize

# Copies of its largest matrix that Muon holds while it orthogonalizes it: the step in float32, and
# in bfloat16 the matrix, its product with itself, a polynomial of that and the result.
MUON_COPY_BYTES = 4 + 4 * 2


@dataclass(frozen=True)
class Memory:
    """Bytes by what holds them. The peak is `held`, which is permanent, plus the largest phase."""

    held: dict[str, int]
    phases: dict[str, dict[str, int]]  # one after the other

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.phases[self.peak_phase].values())


def state_bytes(config: Config, size: ModelSize) -> dict[str, int]:
    """Return the bytes of a model's optimizer state, on the device or off it.

    Muon keeps one float32 number per weight of the blocks' matrices; AdamW keeps two.
    """
    per_parameter = {"adamw_8bit": 2, "rmsprop": 4}.get(config.optimizer.kind, 8)
    state = per_parameter * size.trained
    if config.optimizer.kind == "muon":
        state -= 4 * size.matrices
    master = 0 if config.model.dtype == "float32" else 4
    return {"optimizer state": state, "float32 masters": master * size.trained}


def state_bytes_on_device(config: Config, size: ModelSize) -> dict[str, int]:
    """Return the bytes of a model's optimizer state on the device."""
    device = torch.device(config.model.device)
    if config.optimizer.kind == "adamw_offloaded" and supports_state_streaming(device):
        return {}
    return state_bytes(config, size)


def optimizer_working_bytes(config: Config, size: ModelSize) -> int:
    """Return the extra bytes of an optimizer step.

    AdamW updates one tensor at a time on the CPU, all at once elsewhere. Muon does so one by one.
    """
    kind = config.optimizer.kind
    if kind == "adamw_fused":
        return 0
    if kind == "adamw_8bit":  # two moments, numbers of levels and their inputs in float32 or int64
        return 7 * 4 * min(adamw_8bit.SLICE_ELEMENTS, size.largest)
    if config.model.device == "cpu":
        return 2 * 4 * size.largest
    if kind == "adamw_offloaded":
        return NUM_SLOTS * 3 * 4 * SLICE_ELEMENTS
    if kind == "muon":
        return max(MUON_COPY_BYTES * size.largest, 4 * (size.trained - size.matrices))
    return 4 * size.trained
