"""How the processes that share a model hold it: here one process, which holds all of it.

The classes that train and read models ask a `OneRank` for passes, columns, weights and files.
With several ranks they ask a `ShardedModel` (parallel/sharded.py), which answers with collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.config.schema import Config, OptimizerConfig
from postgrad.model.checkpoint_files import File, FolderFile
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import save_weights
from postgrad.model.lora import merged_weights
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.optimizers.optimizer import Optimizer
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.types import Batch

# (pass, ids to predict, ids that sampling kept) -> a named tuple of columns of response tokens
Compute = Callable[[MicroBatch, Tensor, SampledSupport | None], Any]


class OneRank:
    """A model that this process holds alone: nothing is divided, so nothing is gathered."""

    rank = 0  # of this process among those that share the model
    is_first = True

    def __init__(self, config: Config, loaded: Loaded) -> None:
        self.config = config
        self.loaded = loaded
        self.device: torch.device = next(loaded.model.parameters()).device

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Return the forward passes over the rows that this process computes."""
        budget = self.config.training.token_budget
        return make_micro_batches(batch, budget, self.loaded.model, row_groups)

    def run(
        self,
        compute: Compute,
        micro: MicroBatch,
        targets: Tensor,
        kept: SampledSupport | None = None,
    ) -> Any:
        """Return what `compute` gives for the response tokens of a pass."""
        return compute(micro, targets, kept)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return columns of all rows; each rank filled its rows and left 0 elsewhere."""
        return columns

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        """Return the metrics of all rows."""
        return metrics

    def make_optimizer(
        self,
        modules: nn.Module,
        config: OptimizerConfig,
        lr_scales: dict[str, float] | None = None,
    ) -> Optimizer:
        return Optimizer(modules, config, lr_scales)

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights that this rank sends, by stock name, with adapters merged."""
        return merged_weights(self.loaded.model)

    def shard_of(self, p: Tensor, full: Tensor | None = None) -> Tensor:
        """Return the part of a parameter that this rank holds, or of its full tensor."""
        return p if full is None else full

    # ---- files

    def full_tensors(
        self, parameters: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return full tensors of parameters, those of shards in `dtype`; on the first rank only."""
        return {name: p.detach() for name, p in parameters.items()}

    def model_files(self, folder: Path) -> list[File]:
        """Return this rank's files of a stock Hugging Face folder."""
        return [FolderFile(save_weights, self.loaded, self.weights(), folder)]

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], read: Callable[[], dict[str, Tensor]]) -> None:
        """Copy full tensors that `read` returns into the parameters, by name."""
        tensors = read()
        for name, p in parameters.items():
            p.copy_(tensors[name])
