"""A model sharded over ranks by FSDP2: what OneRank answers for one process.

Each rank holds a float32 shard of every trained parameter: the master that its optimizer steps.
A pass gathers the shards of one block in the compute type and frees them afterwards. Gradients are
summed in float32 into the shards. Each rank writes its part of a checkpoint, which a run can resume
from with any number of ranks or in one process. LoRA adapters are sharded like other weights; the
frozen base weights are shards of the compute type.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.config.schema import Config, OptimizerConfig
from postgrad.errors import Conflict, Unsupported
from postgrad.model.checkpoint_files import (
    File,
    ModelFiles,
    TensorsFile,
    assign_weights,
    copy_to_host,
    part_path,
    to_stock_names,
)
from postgrad.model.device import DTYPES
from postgrad.model.load.formats import Loaded
from postgrad.model.lora import (
    BASE_SUFFIX,
    adapted_modules,
    adapter_parameters,
    lora_matrices,
    merge,
    stock_name,
)
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.one_rank import Compute, OneRank
from postgrad.model.parallel.ranks import Ranks, divide_tokens
from postgrad.model.parallel.sharding import ShardedOptimizer, local_tensor, shard_model
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import sees_pictures, support_of, vision_of
from postgrad.types import Batch


class ShardedModel(OneRank):
    """One rank's shards of a model. Most functions are collectives: all ranks call them."""

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        mesh: Ranks,
        masters: bool,
        head: nn.Module | None = None,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.mesh = mesh
        self.rank = mesh.rank
        self.is_first = mesh.is_first
        self.device = mesh.device
        self.compute_dtype = DTYPES[config.model.dtype]
        check_sequence_parallel(loaded, mesh)
        if not masters:
            loaded.model.requires_grad_(False)
        if head is not None:
            with torch.no_grad():
                for p in head.parameters():
                    p.copy_(mesh.broadcast(p.detach(), p, p.dtype))
        if sees_pictures(loaded.model):
            vision_of(loaded.model).is_shared = True
        self.root = shard_model(loaded.model, mesh, self.compute_dtype, masters, head)

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        def make(own_rows: Batch, own_groups: list[int] | None) -> list[MicroBatch]:
            budget = self.config.training.token_budget
            return make_micro_batches(own_rows, budget, self.loaded.model, own_groups, self.device)

        passes = self.mesh.micro_batches(batch, row_groups, make)
        if "images" not in batch.rows:
            return passes
        self._check_pictures()
        none = vision_of(self.loaded.model).join([], {}, 1)
        return [one if one.rows else replace(one, pictures=none) for one in passes]

    def _check_pictures(self) -> None:
        """Raise ConfigError if ranks share a row or a matrix."""
        groups = {
            "tensor_parallel": self.mesh.tensor,
            "sequence_parallel": self.mesh.sequence,
            "expert_parallel": self.mesh.expert,
        }
        for name, group in groups.items():
            if group.size > 1:
                raise Unsupported(
                    f"cluster.{name}={group.size} does not support pictures, which the data have; "
                    "set it to 1",
                    at=f"cluster.{name}",
                )

    def run(
        self,
        compute: Compute,
        micro: MicroBatch,
        targets: Tensor,
        kept: SampledSupport | None = None,
    ) -> Any:
        return self.root(self._run_unsharded, compute, micro, targets, kept)

    def _run_unsharded(
        self, compute: Compute, micro: MicroBatch, targets: Tensor, kept: SampledSupport | None
    ) -> Any:
        group = self.mesh.sequence
        if group.size == 1:
            return compute(micro, targets, kept)
        own = divide_tokens(micro, group)
        own_kept = None if kept is None else kept.select(own.predicted)
        outputs = compute(own.micro, targets[own.predicted], own_kept)
        return outputs._make(own.join(column, group) for column in outputs)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.mesh.sum_rows(column) for name, column in columns.items()}

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        return MetricAccumulator.merge(self.mesh.gather_json(metrics.to_dict()))

    def make_optimizer(
        self,
        modules: nn.Module,
        config: OptimizerConfig,
        lr_scales: dict[str, float] | None = None,
    ) -> ShardedOptimizer:
        return ShardedOptimizer(modules, config, self.mesh, self.compute_dtype, lr_scales)

    def shard_of(self, p: Tensor, full: Tensor | None = None) -> Tensor:
        return local_tensor(p) if full is None else self.mesh.local_shard(full, p)

    # ---- full weights

    def weights(self) -> dict[str, Tensor]:
        return dict(self.own_weights())

    def own_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share of the full weights, in host memory.

        Each rank has the weights of other blocks. A collective: all ranks use up the iterator.
        """
        model = self.loaded.model
        adapter_names = adapter_parameters(model).keys()
        sizes: dict[str, int] = {}
        for name, p in model.named_parameters():
            if name not in adapter_names:
                sizes[stock_name(name)] = p.numel()
        owners = assign_weights(sizes, self.mesh.size)
        for name, weight in self._full_state():
            if owners[name] == self.rank:
                yield name, weight.to("cpu", dtype or self.compute_dtype, copy=True)

    @torch.no_grad()
    def _full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight with its stock name, adapters merged, on every rank."""
        model = self.loaded.model
        modules = adapted_modules(model)
        adapter_names = adapter_parameters(model).keys()
        for name, p in model.named_parameters():
            if name in adapter_names:
                continue
            weight = self.full_tensor(p)
            module = modules.get(name.removesuffix(BASE_SUFFIX))
            if name.endswith(BASE_SUFFIX) and module is not None:
                matrices = (self.full_tensor(m) for m in lora_matrices(module))
                first, second = (m.to(self.compute_dtype) for m in matrices)
                weight = merge(weight, module, first, second)
            yield stock_name(name), weight

    def full_tensor(self, p: Tensor, shard: Tensor | None = None) -> Tensor:
        """Return the full tensor of a parameter, or of a shard that is divided as it is."""
        return self.mesh.full_tensor(local_tensor(p) if shard is None else shard, p)

    @torch.no_grad()
    def copy_weights_to(self, model: nn.Module) -> None:
        """Copy the full weights into an unsharded model on every rank, one tensor at a time."""
        parameters = dict(model.named_parameters())
        for name, weight in self._full_state():
            parameters[name].copy_(weight)

    # ---- files

    def full_tensors(
        self, parameters: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, p in parameters.items():
            full = self.full_tensor(p)
            if self.is_first:
                tensors[name] = full.to("cpu", dtype, copy=True)
        return tensors

    def model_files(self, folder: Path) -> list[File]:
        model = self.loaded.model
        weights = dict(self.own_weights(self.compute_dtype))
        if self.is_first:
            persistent = model.state_dict().keys()
            buffers = {name: b for name, b in model.named_buffers() if name in persistent}
            weights |= copy_to_host(buffers)
        tensors = to_stock_names(model, weights)
        nbytes = {name: tensor.nbytes for name, tensor in tensors.items()}
        by_rank = self.mesh.gather_json(nbytes, self.mesh.world)
        writing = [rank for rank, of_rank in enumerate(by_rank) if of_rank]
        paths: dict[int, Path] = {}
        for number, rank in enumerate(writing):
            paths[rank] = part_path(folder / "model.safetensors", number, len(writing))
        files: list[File] = []
        if tensors:
            files.append(TensorsFile(tensors, paths[self.rank], {"format": "pt"}))
        if self.is_first:
            index: dict[str, tuple[str, int]] = {}
            for rank in writing:
                index |= {name: (paths[rank].name, size) for name, size in by_rank[rank].items()}
            files.append(ModelFiles(self.loaded, self.compute_dtype, folder, index))
        return files

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], read: Callable[[], dict[str, Tensor]]) -> None:
        """Copy this rank's shards of what the first rank reads; only that holds full tensors."""
        tensors = read() if self.is_first else {}
        for name, p in parameters.items():
            full = self.mesh.broadcast(tensors.get(name), p, local_tensor(p).dtype)
            local_tensor(p).copy_(self.mesh.local_shard(full, p))


def check_sequence_parallel(loaded: Loaded, ranks: Ranks) -> None:
    """Raise ConfigError if the tokens of a pass cannot be divided over the ranks."""
    size = ranks.sequence.size
    if size == 1:
        return
    if support_of(loaded.model).passes != "packed":
        raise Unsupported(
            f"cluster.sequence_parallel={size} needs packed passes, which "
            f"{loaded.model.config.model_type} does not have; set it to 1"
        )
    config = loaded.model.config.get_text_config()
    heads = config.num_key_value_heads
    if heads % (size * ranks.tensor.size):
        raise Conflict(
            f"cluster.sequence_parallel x cluster.tensor_parallel = {size * ranks.tensor.size} "
            f"does not divide the model's {heads} key-value heads"
        )
