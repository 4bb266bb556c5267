"""A copy of the policy that follows it: a reference or a teacher that is updated during the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from postgrad.config.schema import Config
from postgrad.model.checkpoint_files import AsyncWriter, File, write_files
from postgrad.model.device import DTYPES
from postgrad.model.load.formats import Loaded
from postgrad.model.policy import FrozenPolicy, read_weights

if TYPE_CHECKING:
    from postgrad.model.parallel.ranks import Ranks


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
    With LoRA it is a full copy of the merged weights. With `ranks` every rank moves its shards.
    """

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        name: str,
        share: float,
        ranks: "Ranks | None" = None,
    ) -> None:
        self.name = name
        self.share = share  # of the policy's weights in the updated copy
        self.is_average = needs_masters(share, DTYPES[config.model.dtype])
        super().__init__(config, loaded, ranks, masters=self.is_average)
        self.model.requires_grad_(False)
        self.parameters = dict(self.model.named_parameters())
        # Shards are float32 masters themselves.
        self.masters: dict[str, Tensor] = {}
        for key, p in self.parameters.items():
            if needs_masters(share, p.dtype):
                self.masters[key] = p.detach().float()
        self.writer = AsyncWriter()

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Move the copy to the policy's weights, given by parameter name."""
        for key, p in self.parameters.items():
            weight = self.ranks.shard_of(p, weights[key])
            if key in self.masters:
                mix(self.masters[key], weight, self.share)
                p.copy_(self.masters[key])
            else:
                mix(self.ranks.shard_of(p), weight, self.share)

    def files(self, folder: Path, copy: bool) -> list[File]:
        masters = self.masters if self.is_average else None
        return self.ranks.model_files(folder / self.name, copy, masters)

    def save(self, folder: str) -> None:
        write_files(self.files(Path(folder), copy=False))

    def begin_save(self, folder: str) -> None:
        self.writer.start(self.files(Path(folder), copy=True))

    def saved(self, wait: bool) -> bool:
        return self.ranks.is_saved(self.writer, wait)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        saved = Path(folder) / self.name
        wanted = self.parameters | self.masters  # masters are read in place of rounded weights
        self.ranks.load(wanted, lambda: read_weights(saved, self.parameters))
        for key, master in self.masters.items():
            self.parameters[key].copy_(master)
