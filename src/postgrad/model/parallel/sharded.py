"""Models sharded over ranks by FSDP2, behind the same ports as the local ones.

Each rank holds a float32 shard of every trained parameter: the master that its optimizer steps.
A pass gathers the shards of one block in the compute type and frees them afterwards. Gradients are
summed in float32 into the shards. Each rank writes its part of a checkpoint, which a run can resume
from with any number of ranks or in one process. LoRA adapters are sharded like other weights; the
frozen base weights are shards of the compute type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.model.checkpoint_files import (
    AdapterFile,
    AsyncWriter,
    File,
    ModelFiles,
    TensorsFile,
    assign_weights,
    copy_to_host,
    part_path,
    to_stock_names,
    write_files,
)
from postgrad.model.critic import LocalCritic, ValueObjective
from postgrad.model.device import DTYPES
from postgrad.model.load.formats import Loaded
from postgrad.model.lora import (
    BASE_SUFFIX,
    adapted_modules,
    adapter_parameters,
    adapters_disabled,
    lora_matrices,
    merge,
    read_adapter,
    stock_name,
)
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.parallel.ranks import Ranks, divide_tokens
from postgrad.model.parallel.sharding import (
    ForwardRoot,
    ShardedOptimizer,
    local_tensor,
    shard_model,
)
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.passes.sampled_support import KeptIds
from postgrad.model.passes.support import support_of
from postgrad.model.policy import FrozenPolicy, LocalPolicy, Objective, read_weights
from postgrad.model.port import FULL, TokenOutputs, View
from postgrad.model.score_head import VALUE_HEAD
from postgrad.types import Batch


class Sharded:
    """What all sharded ports share: rows divided over ranks, results and weights gathered."""

    config: Config
    loaded: Loaded
    ranks: Ranks
    root: ForwardRoot
    compute: torch.dtype
    writer: AsyncWriter
    weights_version: int = 0  # counts how often the weights changed

    def shard(self, config: Config, loaded: Loaded, ranks: Ranks, masters: bool) -> None:
        self.config = config
        self.loaded = loaded
        self.ranks = ranks
        self.compute = DTYPES[config.model.dtype]
        check_sequence_parallel(loaded, ranks)
        self.root = shard_model(loaded.model, ranks, self.compute, masters)

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        def make(own_rows: Batch, own_groups: list[int] | None) -> list[MicroBatch]:
            budget = self.config.training.token_budget
            model = self.loaded.model
            return make_micro_batches(own_rows, budget, model, own_groups, self.ranks.device)

        return self.ranks.micro_batches(batch, row_groups, make)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """All-gather columns across ranks: each rank filled its own rows and left 0 elsewhere."""
        return {name: self.ranks.sum_rows(column) for name, column in columns.items()}

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        return MetricAccumulator.merge(self.ranks.gather_json(metrics.to_dict()))

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of the weights that are sent and saved."""
        return self.compute

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights that this rank sends, in host memory. A collective."""
        return dict(self.own_weights())

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share of the full weights, in host memory.

        Each rank has the weights of other blocks. A collective: all ranks use up the iterator.
        """
        model = self.loaded.model
        adapter_names = adapter_parameters(model).keys()
        sizes: dict[str, int] = {}
        for name, p in model.named_parameters():
            if name not in adapter_names:
                sizes[stock_name(name)] = p.numel()
        owners = assign_weights(sizes, self.ranks.size)
        for name, weight in self.full_state():
            if owners[name] == self.ranks.rank:
                yield name, weight.to("cpu", self.stored_dtype, copy=True)

    @torch.no_grad()
    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight with its stock name, adapters merged, on every rank."""
        model = self.loaded.model
        modules = adapted_modules(model)
        adapter_names = adapter_parameters(model).keys()
        for name, p in model.named_parameters():
            if name in adapter_names:
                continue
            weight = self.full(p)
            module = modules.get(name.removesuffix(BASE_SUFFIX))
            if name.endswith(BASE_SUFFIX) and module is not None:
                first, second = (self.full(m).to(self.compute) for m in lora_matrices(module))
                weight = merge(weight, module, first, second)
            yield stock_name(name), weight

    def full(self, p: Tensor) -> Tensor:
        """Return the full tensor of a sharded parameter. A collective."""
        return self.ranks.full_tensor(local_tensor(p), p)

    def _keep_on_first_rank(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return copies in host memory, in the compute type, on the first rank only."""
        kept: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self.ranks.is_first:
                kept[name] = tensor.to("cpu", self.compute, copy=True)
        return kept

    @torch.no_grad()
    def copy_weights_to(self, model: nn.Module) -> None:
        """Copy the full weights into an unsharded model on every rank, one tensor at a time."""
        parameters = dict(model.named_parameters())
        for name, weight in self.full_state():
            parameters[name].copy_(weight)

    def files(self, folder: str) -> list[File]:
        """Return this rank's files of a checkpoint, with tensors in host memory. A collective."""
        raise NotImplementedError("the policy and the critic have their own files")

    def model_files(self, folder: Path) -> list[File]:
        """Return this rank's files of a stock Hugging Face folder. A collective."""
        model = self.loaded.model
        own = self.weights()
        if self.ranks.is_first:
            persistent = model.state_dict().keys()
            buffers = {name: b for name, b in model.named_buffers() if name in persistent}
            own |= copy_to_host(buffers)
        tensors = to_stock_names(model, own)
        nbytes = {name: tensor.nbytes for name, tensor in tensors.items()}
        by_rank = self.ranks.gather_json(nbytes, self.ranks.world)
        return self._name_model_files(folder, tensors, by_rank)

    def _name_model_files(
        self, folder: Path, tensors: dict[str, Tensor], by_rank: list[dict[str, int]]
    ) -> list[File]:
        """Return the files; `by_rank` has the bytes of the weights that each rank writes."""
        writing = [rank for rank, nbytes in enumerate(by_rank) if nbytes]
        names: dict[int, Path] = {}
        for number, rank in enumerate(writing):
            names[rank] = part_path(folder / "model.safetensors", number, len(writing))
        files: list[File] = []
        if tensors:
            files.append(TensorsFile(tensors, names[self.ranks.rank], {"format": "pt"}))
        if self.ranks.is_first:
            index: dict[str, tuple[str, int]] = {}
            for rank in writing:
                index |= {name: (names[rank].name, size) for name, size in by_rank[rank].items()}
            files.append(ModelFiles(self.loaded, self.stored_dtype, folder, index))
        return files

    def save(self, folder: str) -> None:
        write_files(self.files(folder))

    def begin_save(self, folder: str) -> None:
        self.writer.start(self.files(folder))

    def saved(self, wait: bool) -> bool:
        """Return whether all ranks have written their files. A collective."""
        error: RunError | None = None
        done = False
        try:
            done = self.writer.done(wait)
        except RunError as raised:  # the other ranks must not wait for this one
            error = raised
        num_unfinished = self.ranks.all_reduce_max(int(not done and error is None))
        if error is not None:
            raise error
        return num_unfinished == 0

    @torch.no_grad()
    def load_shards(
        self, read: Callable[[], dict[str, Tensor]], params: dict[str, nn.Parameter]
    ) -> None:
        """Copy this rank's shards of what the first rank reads into the parameters. A collective.

        Only the first rank holds the full tensors, as at the start of a run.
        """
        tensors = read() if self.ranks.is_first else {}
        for name, p in params.items():
            full = self.ranks.broadcast(tensors.get(name), p, local_tensor(p).dtype)
            local_tensor(p).copy_(self.ranks.local_shard(full, p))


def check_sequence_parallel(loaded: Loaded, ranks: Ranks) -> None:
    """Raise ConfigError if the tokens of a pass cannot be divided over the ranks."""
    size = ranks.sequence.size
    if size == 1:
        return
    if support_of(loaded.model).passes != "packed":
        raise ConfigError(
            f"cluster.sequence_parallel={size} needs packed passes, which "
            f"{loaded.model.config.model_type} does not have; set it to 1"
        )
    config = loaded.model.config.get_text_config()
    heads = config.num_key_value_heads
    if heads % (size * ranks.tensor.size):
        raise ConfigError(
            f"cluster.sequence_parallel x cluster.tensor_parallel = {size * ranks.tensor.size} "
            f"does not divide the model's {heads} key-value heads"
        )


class ShardedOutputs(Sharded, FrozenPolicy):
    """Passes of a sharded model whose tokens may be divided over ranks."""

    def forward(
        self, micro: MicroBatch, targets: Tensor, view: View, kept: KeptIds | None = None
    ) -> TokenOutputs:
        return self.root(self._forward_unsharded, micro, targets, view, kept)

    def _forward_unsharded(
        self, micro: MicroBatch, targets: Tensor, view: View, kept: KeptIds | None
    ) -> TokenOutputs:
        group = self.ranks.sequence
        if group.size == 1:
            return FrozenPolicy.forward(self, micro, targets, view, kept)
        own = divide_tokens(micro, group)
        own_kept = None if kept is None else kept.select(own.predicted)
        outputs = FrozenPolicy.forward(self, own.micro, targets[own.predicted], view, own_kept)
        return TokenOutputs(*(own.join(column, group) for column in outputs))

    def forward_top(self, micro: MicroBatch, num_top: int, num_ids: int) -> tuple[Tensor, Tensor]:
        return self.root(self._forward_top_unsharded, micro, num_top, num_ids)

    def _forward_top_unsharded(
        self, micro: MicroBatch, num_top: int, num_ids: int
    ) -> tuple[Tensor, Tensor]:
        group = self.ranks.sequence
        if group.size == 1:
            return FrozenPolicy.forward_top(self, micro, num_top, num_ids)
        own = divide_tokens(micro, group)
        ids, logprobs = FrozenPolicy.forward_top(self, own.micro, num_top, num_ids)
        return own.join(ids, group), own.join(logprobs, group)


class ShardedFrozen(ShardedOutputs):
    """A model that computes log-probs and is never trained, sharded over the ranks."""

    def __init__(self, config: Config, loaded: Loaded, ranks: Ranks) -> None:
        loaded.model.requires_grad_(False)
        self.shard(config, loaded, ranks, masters=False)
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device


class ShardedPolicy(ShardedOutputs, LocalPolicy):
    """The policy, sharded over the ranks."""

    optimizer: ShardedOptimizer

    def __init__(self, config: Config, loaded: Loaded, objective: Objective, ranks: Ranks) -> None:
        self.shard(config, loaded, ranks, masters=True)
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device
        # FSDP fixes its types in the first pass by what requires a gradient: here everything.
        with torch.no_grad():
            no_targets = torch.zeros(0, dtype=torch.int64, device=self.device)
            self.forward(self.ranks.idle_pass().to(self.device), no_targets, FULL)
        LocalPolicy.__init__(self, config, loaded, objective)
        self.device = ranks.device
        self.rank = ranks.rank

    def make_optimizer(self, scales: dict[str, float]) -> ShardedOptimizer:
        return ShardedOptimizer(self.model, self.config.optimizer, self.ranks, self.compute, scales)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        self.weights_version += 1
        return super().update(batch, step)

    def token_stats(self) -> dict[str, Tensor]:
        own = super().token_stats()
        counts = self.gather({name: (~column.isnan()).float() for name, column in own.items()})
        values = self.gather({name: column.nan_to_num() for name, column in own.items()})
        return {name: values[name].where(counts[name] > 0, torch.nan) for name in own}

    def files(self, folder: str) -> list[File]:
        files = self.model_files(Path(folder) / "policy")
        files += self.optimizer.files(Path(folder) / "optimizer.safetensors")
        if self.has_adapters:
            parameters = adapter_parameters(self.model).items()
            adapter = self._keep_on_first_rank((name, self.full(p)) for name, p in parameters)
            if self.ranks.is_first:
                files.append(AdapterFile(self.loaded, adapter, Path(folder) / "adapter"))
        return files

    def load(self, folder: str) -> None:
        self.weights_version += 1
        if self.has_adapters:
            adapter = Path(folder) / "adapter"
            parameters = adapter_parameters(self.model)
            self.load_shards(lambda: read_adapter(self.model, adapter), parameters)
        else:
            policy = Path(folder) / "policy"
            parameters = dict(self.model.named_parameters())
            self.load_shards(lambda: read_weights(policy, parameters), parameters)
        self.optimizer.load(Path(folder) / "optimizer.safetensors")


class ShardedBaseModel:
    """The base model of a sharded policy: the same shards, with the adapters disabled."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.logprobs(batch, view)

    def top_logprobs(self, batch: Batch, num_top: int) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.top_logprobs(batch, num_top)


class ShardedCritic(Sharded, LocalCritic):
    """The critic, sharded over the ranks. Its value head computes in float32, as locally."""

    optimizer: ShardedOptimizer

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        objective: ValueObjective,
        lr: float,
        ranks: Ranks,
        path: str = "",
    ) -> None:
        self.ranks = ranks
        self.compute = DTYPES[config.model.dtype]
        check_sequence_parallel(loaded, ranks)
        LocalCritic.__init__(self, config, loaded, objective, lr, path)

    @torch.no_grad()
    def initialize_head(self, path: str) -> None:
        if self.ranks.is_first:
            LocalCritic.initialize_head(self, path)
        for p in self.head.parameters():
            p.copy_(self.ranks.broadcast(p.detach(), p, p.dtype))

    def forward(self, micro: MicroBatch) -> Tensor:
        return self.root(self._forward_unsharded, micro)

    def _forward_unsharded(self, micro: MicroBatch) -> Tensor:
        group = self.ranks.sequence
        if group.size == 1:
            return LocalCritic.forward(self, micro).clone()
        own = divide_tokens(micro, group)
        return own.join(LocalCritic.forward(self, own.micro), group)

    def make_optimizer(self, modules: nn.Module) -> ShardedOptimizer:
        self.root = shard_model(
            self.loaded.model,
            self.ranks,
            self.compute,
            masters=True,
            float32_module=self.head,
        )
        self.device = self.ranks.device
        with torch.no_grad():  # see ShardedPolicy
            self.forward(self.ranks.idle_pass().to(self.device))
        return ShardedOptimizer(modules, self.optimizer_config, self.ranks, self.compute)

    def files(self, folder: str) -> list[File]:
        files = self.model_files(Path(folder) / "critic")
        files += self.optimizer.files(Path(folder) / "critic_optimizer.safetensors")
        head = {name: self.full(p).to("cpu", copy=True) for name, p in self.head.named_parameters()}
        if self.ranks.is_first:
            files.append(TensorsFile(head, Path(folder) / "critic" / VALUE_HEAD))
        return files

    def load(self, folder: str) -> None:
        critic = Path(folder) / "critic"
        parameters = dict(self.loaded.model.named_parameters())
        self.load_shards(lambda: read_weights(critic, parameters), parameters)
        head = dict(self.head.named_parameters())
        self.load_shards(lambda: load_file(critic / VALUE_HEAD), head)
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")
