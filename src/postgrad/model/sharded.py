"""Models whose weights, gradients and optimizer state are divided over ranks by FSDP2, behind the ports of the local ones.

Each rank holds a float32 shard of every parameter that is trained: the master that its optimizer steps. For a pass the shards of one
block are gathered in the compute type, and go again after it; gradients are summed in float32 into the shards. What is saved is whole and
has the names of the local files, so a run can go on with any number of ranks, or with none. LoRA adapters are divided like any other
weights; what they stand beside lies in shards of the compute type.
"""

from collections.abc import Callable, Iterator, Sequence
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


class Root(nn.Module):
    """A port's forward pass as the forward of a module, so that FSDP gathers what the pass reads beside the blocks."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *arguments: Any) -> Any:
        return self.run(*arguments)


def shard_model(
    model: nn.Module,
    run: Callable[..., Any],
    ranks: Ranks,
    compute: torch.dtype,
    masters: bool,
    wide: nn.Module | None = None,
) -> Root:
    """Divide the blocks of a model, then what lies around them; `masters` keeps the shards of what is trained in float32.

    A `wide` module beside it computes in float32 whatever the model does.
    """
    offload: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu")
        if ranks.offload
        else OffloadPolicy()
    )

    def divide(module: nn.Module, dtype: torch.dtype) -> None:
        for p in module.parameters() if masters else []:
            if not isinstance(p, DTensor) and p.requires_grad:
                p.data = p.data.float()
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(
            module,
            mesh=ranks.mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=True,
        )

    for block in blocks_of(model):
        divide(block, compute)
    if wide is not None:
        divide(wide, torch.float32)
    root = Root(model if wide is None else nn.ModuleList([model, wide]), run)
    divide(root, compute)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is weighted by global counts: gradients are added, never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformers model: what its longest list of modules holds."""
    lists = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    return list(max(lists, key=len)) if lists else []


class ShardedOptimizer(Optimizer):
    """The optimizer of this rank's shards. The tensors it steps are the shards' own memory."""

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
                "optimizer.kind=adamw_8bit cannot be divided over ranks; use adamw, or cluster.offload=true for memory"
            )
        self.ranks, self.compute = ranks, compute
        self.whole = {name: p for name, p in model.named_parameters() if p.requires_grad}
        super().__init__(model, config, lr_scale)

    def own_params(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: local(p) for name, p in self.whole.items()}

    def has_gradients(self) -> bool:
        for name, p in self.whole.items():
            if p.grad is not None:
                self.masters[name].grad, p.grad = local(p.grad), None
        return super().has_gradients()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        squares = torch.stack([g.double().square().sum() for g in gradients]).sum()
        return self.ranks.total(squares).sqrt().float()

    def tensors(self) -> dict[str, Tensor]:
        """Whole tensors on the first rank, nothing on the others."""
        parts = super().tensors()
        if self.compute != torch.float32:
            parts |= {f"master/{name}": p for name, p in self.params.items()}
        out: dict[str, Tensor] = {}
        for place, part in parts.items():
            whole = self.whole[place.partition("/")[2]]
            value = part if part.dim() == 0 else self.ranks.full(part, whole)
            if self.ranks.is_first:
                out[place] = value.to("cpu", copy=True).contiguous()
        return out

    def read(self, file: Path) -> dict[str, Tensor]:
        """This rank's parts of what was saved."""
        parts = {
            place: t if t.dim() == 0 else self.ranks.shard(t)
            for place, t in super().read(file).items()
        }
        with torch.no_grad():
            for name, p in self.params.items():
                if f"master/{name}" in parts:
                    p.copy_(parts.pop(f"master/{name}"))
        return parts


class Sharded:
    """What all sharded ports share: rows divided over the ranks, columns and metrics put together again."""

    config: Config
    loaded: Loaded
    ranks: Ranks
    root: Root
    compute: torch.dtype
    writer: AsyncWriter
    weights_version: int = 0  # counts how often the weights changed

    def divide(
        self, config: Config, loaded: Loaded, ranks: Ranks, run: Callable[..., Any], masters: bool
    ) -> None:
        self.config, self.loaded, self.ranks, self.compute = (
            config,
            loaded,
            ranks,
            DTYPES[config.model.dtype],
        )
        self.root = shard_model(loaded.model, run, ranks, self.compute, masters)

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        budget, model, device = (
            self.config.training.token_budget,
            self.loaded.model,
            self.ranks.device,
        )
        return self.ranks.passes(
            batch,
            row_groups,
            lambda mine, units: make_micro_batches(mine, budget, model, units, device),
        )

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.ranks.total(column) for name, column in columns.items()}

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        return MetricAccumulator.merge(self.ranks.gather(metrics.to_dict()))

    def weights(self) -> dict[str, Tensor]:
        """The whole compute weights on the first rank, nothing on the others."""
        return self._gather_to_first_rank(self.full_state())

    @torch.no_grad()
    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight by its stock name, one after the other, with its adapter merged; on every rank."""
        model = self.loaded.model
        modules, own = adapted_modules(model), adapter_parameters(model)
        for name, p in model.named_parameters():
            if name in own:
                continue
            value = self.full(p)
            if (
                name.endswith(BASE_SUFFIX)
                and (module := modules.get(name.removesuffix(BASE_SUFFIX))) is not None
            ):
                value = merge(
                    value,
                    module,
                    *(self.full(matrix).to(self.compute) for matrix in lora_matrices(module)),
                )
            yield stock_name(name), value

    def full(self, p: Tensor) -> Tensor:
        return self.ranks.full(local(p), p)

    def _gather_to_first_rank(self, named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies in host memory, in the compute type, on the first rank; the others only give their shards."""
        out: dict[str, Tensor] = {}
        for name, value in named:
            if self.ranks.is_first:
                out[name] = value.to("cpu", self.compute, copy=True)
        return out

    @torch.no_grad()
    def copy_weights_to(self, model: nn.Module) -> None:
        """Put the whole weights into another model of the same kind that every rank has, one tensor at a time."""
        theirs = dict(model.named_parameters())
        for name, value in self.full_state():
            theirs[name].copy_(value)

    def files(self, folder: str) -> list[File]:
        raise NotImplementedError

    def save(self, folder: str) -> None:
        for file in self._mine(folder):
            file.write()

    def begin_save(self, folder: str) -> None:
        self.writer.start(self._mine(folder))

    def _mine(self, folder: str) -> list[File]:
        files = self.files(folder)  # a meeting: every rank gives its shards
        return files if self.ranks.is_first else []

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor], params: dict[str, nn.Parameter]) -> None:
        """Continue from saved weights."""
        for name, p in params.items():
            local(p).copy_(self.ranks.shard(tensors[name]))


class ShardedFrozen(Sharded, FrozenPolicy):
    """A model that answers and never learns, divided over the ranks."""

    def __init__(self, config: Config, loaded: Loaded, ranks: Ranks) -> None:
        loaded.model.requires_grad_(False)
        self.divide(
            config, loaded, ranks, lambda *given: FrozenPolicy.forward(self, *given), masters=False
        )
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device

    def forward(self, micro: MicroBatch, targets: Tensor, view: View) -> TokenOutputs:
        return self.root(micro, targets, view)


class ShardedPolicy(Sharded, LocalPolicy):
    """The policy, divided over the ranks."""

    def __init__(self, config: Config, loaded: Loaded, objective: Objective, ranks: Ranks) -> None:
        self.divide(
            config, loaded, ranks, lambda *given: FrozenPolicy.forward(self, *given), masters=True
        )
        FrozenPolicy.__init__(self, config, loaded)
        self.device = ranks.device
        with (
            torch.no_grad()
        ):  # FSDP settles types at the first pass, by what needs a gradient then: everything
            self.forward(
                idle_pass().to(self.device),
                torch.zeros(0, dtype=torch.int64, device=self.device),
                FULL,
            )
        LocalPolicy.__init__(self, config, loaded, objective)
        self.device, self.rank = ranks.device, ranks.rank

    def forward(self, micro: MicroBatch, targets: Tensor, view: View) -> TokenOutputs:
        return self.root(micro, targets, view)

    def make_optimizer(self, scales: dict[str, float]) -> Optimizer:
        return ShardedOptimizer(self.model, self.config.optimizer, self.ranks, self.compute, scales)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        self.weights_version += 1
        return super().update(batch, step)

    def token_stats(self) -> dict[str, Tensor]:
        mine = super().token_stats()
        counts = self.gather({name: (~column.isnan()).float() for name, column in mine.items()})
        values = self.gather({name: column.nan_to_num() for name, column in mine.items()})
        return {name: values[name].where(counts[name] > 0, torch.nan) for name in mine}

    def files(self, folder: str) -> list[File]:
        """Everything to be written, whole, on the first rank; nothing on the others."""
        files: list[File] = [
            WeightsFile(self.loaded, self.weights(), Path(folder) / "policy"),
            TensorsFile(self.optimizer.tensors(), Path(folder) / "optimizer.safetensors"),
        ]
        if self.has_adapters:
            own = self._gather_to_first_rank(
                (name, self.full(p)) for name, p in adapter_parameters(self.model).items()
            )
            files.append(AdapterFile(self.loaded, own, Path(folder) / "adapter"))
        return files

    def load(self, folder: str) -> None:
        self.weights_version += 1
        if self.has_adapters:
            self.take(
                read_adapter(self.model, Path(folder) / "adapter"), adapter_parameters(self.model)
            )
        else:
            self.take(read_weights(Path(folder) / "policy"), dict(self.model.named_parameters()))
        self.optimizer.load(Path(folder) / "optimizer.safetensors")


class ShardedBaseModel:
    """What a divided policy with adapters was before them: the same shards, asked with the adapters off."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.logprobs(batch, view)


class ShardedCritic(Sharded, LocalCritic):
    """The critic, divided over the ranks; its value head computes in float32 as the local one's does."""

    def __init__(
        self, config: Config, loaded: Loaded, objective: ValueObjective, lr: float, ranks: Ranks
    ) -> None:
        self.ranks, self.compute = ranks, DTYPES[config.model.dtype]
        LocalCritic.__init__(self, config, loaded, objective, lr)

    def forward(self, micro: MicroBatch) -> Tensor:
        return self.root(micro)

    def make_optimizer(self, body: nn.Module) -> Optimizer:
        run = lambda *given: LocalCritic.forward(self, *given).clone()  # noqa: E731
        self.root = shard_model(
            self.loaded.model, run, self.ranks, self.compute, masters=True, wide=self.head
        )
        self.device = self.ranks.device
        with torch.no_grad():
            self.forward(idle_pass().to(self.device))
        return ShardedOptimizer(body, self.optimizer_config, self.ranks, self.compute)

    def files(self, folder: str) -> list[File]:
        head = {name: self.full(p).to("cpu", copy=True) for name, p in self.head.named_parameters()}
        return [
            WeightsFile(self.loaded, self.weights(), Path(folder) / "critic"),
            TensorsFile(head, Path(folder) / "critic" / "value_head.safetensors"),
            TensorsFile(self.optimizer.tensors(), Path(folder) / "critic_optimizer.safetensors"),
        ]

    def load(self, folder: str) -> None:
        self.take(read_weights(Path(folder) / "critic"), dict(self.loaded.model.named_parameters()))
        self.take(
            load_file(Path(folder) / "critic" / "value_head.safetensors"),
            dict(self.head.named_parameters()),
        )
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a divided tensor, its very memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()
