"""A copy of the policy that follows it: a reference or a teacher that is updated during the run."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from postgrad.config.schema import Config
from postgrad.model.checkpoint_files import AsyncWriter, WeightsFile, copy_to_host, write_files
from postgrad.model.load.formats import Loaded
from postgrad.model.policy import FrozenPolicy, read_weights


def needs_masters(share: float, dtype: torch.dtype) -> bool:
    """Return whether a copy needs float32 masters: a small share is lost in 16-bit weights."""
    return share < 1 and dtype != torch.float32


@torch.no_grad()
def mix(own: Tensor, weight: Tensor, share: float) -> None:
    """Set own = (1 - share) * own + share * weight, computed in the type of `own`."""
    weight = weight.to(own.device, own.dtype)
    if share == 1:
        own.copy_(weight)
    else:
        own.lerp_(weight, share)


class SyncedPolicy(FrozenPolicy):
    """Log-probs of a copy of the policy. It is never trained; `publish` moves it to the policy.

    A checkpoint holds it as the stock Hugging Face folder `name/`, in float32 if it is an average.
    With LoRA it is a full copy of the merged weights.
    """

    def __init__(self, config: Config, loaded: Loaded, name: str, share: float) -> None:
        super().__init__(config, loaded)
        self.name = name
        self.share = share  # of the policy's weights in the updated copy
        self.parameters = dict(self.model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        for key, p in self.parameters.items():
            if needs_masters(share, p.dtype):
                self.masters[key] = p.detach().float()
        self.writer = AsyncWriter()

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Move the copy to the policy's weights, given by parameter name."""
        for key, p in self.parameters.items():
            if key in self.masters:
                mix(self.masters[key], weights[key], self.share)
                p.copy_(self.masters[key])
            else:
                mix(p, weights[key], self.share)

    def files(self, folder: str) -> list[WeightsFile]:
        weights = copy_to_host(self.parameters | self.masters)
        return [WeightsFile(self.loaded, weights, Path(folder) / self.name)]

    def save(self, folder: str) -> None:
        write_files([*self.files(folder)])

    def begin_save(self, folder: str) -> None:
        self.writer.start(self.files(folder))

    def saved(self, wait: bool) -> bool:
        return self.writer.done(wait)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        tensors = read_weights(Path(folder) / self.name, self.parameters)
        for key, p in self.parameters.items():
            p.copy_(tensors[key])
            if key in self.masters:
                self.masters[key].copy_(tensors[key])
