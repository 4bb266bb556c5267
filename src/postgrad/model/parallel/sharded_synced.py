"""A copy of the policy that follows it (model/synced.py), sharded over the ranks."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from postgrad.config.schema import Config
from postgrad.model.checkpoint_files import AsyncWriter, File
from postgrad.model.device import DTYPES
from postgrad.model.load.formats import Loaded
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.parallel.sharded import ShardedOutputs
from postgrad.model.parallel.sharding import local_tensor
from postgrad.model.policy import FrozenPolicy, read_weights
from postgrad.model.synced import mix, needs_masters


class ShardedSynced(ShardedOutputs):
    """Log-probs of a sharded copy of the policy; every rank moves its own shards."""

    def __init__(
        self, config: Config, loaded: Loaded, ranks: Ranks, name: str, share: float
    ) -> None:
        self.name = name
        self.share = share
        self.has_masters = needs_masters(share, DTYPES[config.model.dtype])
        self.shard(config, loaded, ranks, masters=self.has_masters)
        loaded.model.requires_grad_(False)
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device
        self.writer = AsyncWriter()

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float32 if self.has_masters else self.compute

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Move the shards to those of the policy's full weights."""
        for key, p in self.model.named_parameters():
            mix(local_tensor(p), self.ranks.local_shard(weights[key], p), self.share)

    def files(self, folder: str) -> list[File]:
        return self.model_files(Path(folder) / self.name)

    def load(self, folder: str) -> None:
        saved = Path(folder) / self.name
        parameters = dict(self.model.named_parameters())
        self.load_shards(lambda: read_weights(saved, parameters), parameters)
