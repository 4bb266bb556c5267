"""Models sharded over ranks by FSDP2, behind the same ports as the local ones.

Each rank holds a float32 shard of every trained parameter: the master that its optimizer steps.
A pass gathers the shards of one block in the compute type and frees them afterwards. Gradients are
summed in float32 into the shards. Checkpoints hold full tensors under the names of the local
files, so a run can resume with any number of ranks or in one process. LoRA adapters are sharded
like other weights; the frozen base weights are shards of the compute type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from postgrad.config.schema import Config, OptimizerConfig
from postgrad.errors import ConfigError
from postgrad.model.async_writer import AdapterFile, AsyncWriter, File, TensorsFile, WeightsFile
from postgrad.model.critic import LocalCritic, ValueObjective
from postgrad.model.device import DTYPES
from postgrad.model.loaded import Loaded
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
from postgrad.model.optimizer import Optimizer
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.policy import (
    FrozenPolicy,
    LocalPolicy,
    MetricAccumulator,
    Objective,
    read_weights,
)
from postgrad.model.ranks import Ranks, idle_pass
from postgrad.model.views import FULL, View
from postgrad.types import Batch


class ForwardRoot(nn.Module):
    """A module whose forward is a port's forward pass.

    FSDP then gathers what the pass reads outside of the blocks, such as the LM head.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, *arguments: Any) -> Any:
        return self.run(*arguments)


def shard_model(
    model: nn.Module,
    run: Callable[..., Any],
    ranks: Ranks,
    compute: torch.dtype,
    masters: bool,
    float32_module: nn.Module | None = None,
) -> ForwardRoot:
    """Shard the model's blocks, then the rest; return the root whose forward is `run`.

    `masters` keeps the shards of trained parameters in float32. `float32_module` is sharded too
    and computes in float32, whatever the model's compute type is.
    """
    offload = OffloadPolicy()
    if ranks.offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu")

    def shard(module: nn.Module, dtype: torch.dtype) -> None:
        if masters:
            _convert_to_masters(module)
        fully_shard(
            module,
            mesh=ranks.mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            offload_policy=offload,
            reshard_after_forward=True,
        )

    for block in find_blocks(model):
        shard(block, compute)
    content = model
    if float32_module is not None:
        shard(float32_module, torch.float32)
        content = nn.ModuleList([model, float32_module])
    root = ForwardRoot(content, run)
    shard(root, compute)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is weighted by global counts: gradients are summed, never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _convert_to_masters(module: nn.Module) -> None:
    for p in module.parameters():
        if not isinstance(p, DTensor) and p.requires_grad:
            p.data = p.data.float()


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformers model: the modules of its longest ModuleList."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


class ShardedOptimizer(Optimizer):
    """The optimizer of this rank's shards. It updates the shards' own memory."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        ranks: Ranks,
        compute: torch.dtype,
        lr_scale: dict[str, float] | None = None,
    ) -> None:
        if config.kind == "adamw_8bit":
            raise ConfigError(
                "optimizer.kind=adamw_8bit cannot be sharded over ranks; use optimizer.kind=adamw, "
                "or cluster.offload=true to save memory"
            )
        self.ranks = ranks
        self.compute = compute
        self.sharded_params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(model, config, lr_scale)

    def own_params(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: local_tensor(p) for name, p in self.sharded_params.items()}

    def has_gradients(self) -> bool:
        for name, p in self.sharded_params.items():
            if p.grad is not None:
                self.masters[name].grad = local_tensor(p.grad)
                p.grad = None
        return super().has_gradients()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        squares = torch.stack([g.double().square().sum() for g in gradients]).sum()
        return self.ranks.all_reduce_sum(squares).sqrt().float()

    def tensors(self) -> dict[str, Tensor]:
        """Return full tensors on the first rank, nothing on the others. A collective."""
        shards = super().tensors()
        if self.compute != torch.float32:
            shards |= {f"master/{name}": p for name, p in self.params.items()}
        tensors: dict[str, Tensor] = {}
        for key, shard in shards.items():
            parameter = self.sharded_params[key.partition("/")[2]]
            full = shard if shard.dim() == 0 else self.ranks.full_tensor(shard, parameter)
            if self.ranks.is_first:
                tensors[key] = full.to("cpu", copy=True).contiguous()
        return tensors

    def read(self, file: Path) -> dict[str, Tensor]:
        """Return this rank's shards of the saved tensors; masters go into the shards at once."""
        shards: dict[str, Tensor] = {}
        for key, tensor in super().read(file).items():
            shards[key] = tensor if tensor.dim() == 0 else self.ranks.local_shard(tensor)
        with torch.no_grad():
            for name, p in self.params.items():
                if f"master/{name}" in shards:
                    p.copy_(shards.pop(f"master/{name}"))
        return shards


class Sharded:
    """What all sharded ports share: rows divided over ranks, results and weights gathered."""

    config: Config
    loaded: Loaded
    ranks: Ranks
    root: ForwardRoot
    compute: torch.dtype
    writer: AsyncWriter
    weights_version: int = 0  # counts how often the weights changed

    def shard(
        self, config: Config, loaded: Loaded, ranks: Ranks, run: Callable[..., Any], masters: bool
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.ranks = ranks
        self.compute = DTYPES[config.model.dtype]
        self.root = shard_model(loaded.model, run, ranks, self.compute, masters)

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
        return {name: self.ranks.all_reduce_sum(column) for name, column in columns.items()}

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        return MetricAccumulator.merge(self.ranks.all_gather_json(metrics.to_dict()))

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights on the first rank, nothing on the others. A collective."""
        return self._keep_on_first_rank(self.full_state())

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
        """Return the files of a checkpoint, with full tensors on the first rank. A collective."""
        raise NotImplementedError

    def save(self, folder: str) -> None:
        for file in self._files_to_write(folder):
            file.write()

    def begin_save(self, folder: str) -> None:
        self.writer.start(self._files_to_write(folder))

    def _files_to_write(self, folder: str) -> list[File]:
        files = self.files(folder)
        return files if self.ranks.is_first else []

    @torch.no_grad()
    def load_shards(self, tensors: dict[str, Tensor], params: dict[str, nn.Parameter]) -> None:
        """Copy this rank's shards of saved tensors into the parameters."""
        for name, p in params.items():
            local_tensor(p).copy_(self.ranks.local_shard(tensors[name]))


class ShardedFrozen(Sharded, FrozenPolicy):
    """A model that computes log-probs and is never trained, sharded over the ranks."""

    def __init__(self, config: Config, loaded: Loaded, ranks: Ranks) -> None:
        loaded.model.requires_grad_(False)
        self.shard(config, loaded, ranks, self._forward_unsharded, masters=False)
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device

    def _forward_unsharded(self, *arguments: Any) -> TokenOutputs:
        return FrozenPolicy.forward(self, *arguments)

    def forward(self, micro: MicroBatch, targets: Tensor, view: View) -> TokenOutputs:
        return self.root(micro, targets, view)


class ShardedPolicy(Sharded, LocalPolicy):
    """The policy, sharded over the ranks."""

    def __init__(self, config: Config, loaded: Loaded, objective: Objective, ranks: Ranks) -> None:
        self.shard(config, loaded, ranks, self._forward_unsharded, masters=True)
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device
        # FSDP fixes its types in the first pass by what requires a gradient: here everything.
        with torch.no_grad():
            no_targets = torch.zeros(0, dtype=torch.int64, device=self.device)
            self.forward(idle_pass().to(self.device), no_targets, FULL)
        LocalPolicy.__init__(self, config, loaded, objective)
        self.device = ranks.device
        self.rank = ranks.rank

    def _forward_unsharded(self, *arguments: Any) -> TokenOutputs:
        return FrozenPolicy.forward(self, *arguments)

    def forward(self, micro: MicroBatch, targets: Tensor, view: View) -> TokenOutputs:
        return self.root(micro, targets, view)

    def make_optimizer(self, scales: dict[str, float]) -> Optimizer:
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
        files: list[File] = [
            WeightsFile(self.loaded, self.weights(), Path(folder) / "policy"),
            TensorsFile(self.optimizer.tensors(), Path(folder) / "optimizer.safetensors"),
        ]
        if self.has_adapters:
            parameters = adapter_parameters(self.model).items()
            adapter = self._keep_on_first_rank((name, self.full(p)) for name, p in parameters)
            files.append(AdapterFile(self.loaded, adapter, Path(folder) / "adapter"))
        return files

    def load(self, folder: str) -> None:
        self.weights_version += 1
        if self.has_adapters:
            adapter = read_adapter(self.model, Path(folder) / "adapter")
            self.load_shards(adapter, adapter_parameters(self.model))
        else:
            weights = read_weights(Path(folder) / "policy")
            self.load_shards(weights, dict(self.model.named_parameters()))
        self.optimizer.load(Path(folder) / "optimizer.safetensors")


class ShardedBaseModel:
    """The base model of a sharded policy: the same shards, with the adapters disabled."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.logprobs(batch, view)


class ShardedCritic(Sharded, LocalCritic):
    """The critic, sharded over the ranks. Its value head computes in float32, as locally."""

    def __init__(
        self, config: Config, loaded: Loaded, objective: ValueObjective, lr: float, ranks: Ranks
    ) -> None:
        self.ranks = ranks
        self.compute = DTYPES[config.model.dtype]
        LocalCritic.__init__(self, config, loaded, objective, lr)

    def forward(self, micro: MicroBatch) -> Tensor:
        return self.root(micro)

    def _forward_unsharded(self, micro: MicroBatch) -> Tensor:
        return LocalCritic.forward(self, micro).clone()

    def make_optimizer(self, modules: nn.Module) -> Optimizer:
        self.root = shard_model(
            self.loaded.model,
            self._forward_unsharded,
            self.ranks,
            self.compute,
            masters=True,
            float32_module=self.head,
        )
        self.device = self.ranks.device
        with torch.no_grad():  # see ShardedPolicy
            self.forward(idle_pass().to(self.device))
        return ShardedOptimizer(modules, self.optimizer_config, self.ranks, self.compute)

    def files(self, folder: str) -> list[File]:
        head = {name: self.full(p).to("cpu", copy=True) for name, p in self.head.named_parameters()}
        return [
            WeightsFile(self.loaded, self.weights(), Path(folder) / "critic"),
            TensorsFile(head, Path(folder) / "critic" / "value_head.safetensors"),
            TensorsFile(self.optimizer.tensors(), Path(folder) / "critic_optimizer.safetensors"),
        ]

    def load(self, folder: str) -> None:
        weights = read_weights(Path(folder) / "critic")
        self.load_shards(weights, dict(self.loaded.model.named_parameters()))
        head = load_file(Path(folder) / "critic" / "value_head.safetensors")
        self.load_shards(head, dict(self.head.named_parameters()))
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; it shares the DTensor's memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()
