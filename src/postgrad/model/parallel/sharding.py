"""FSDP2: sharding of a model over ranks, and the optimizer of one rank's shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from postgrad.config.schema import OptimizerConfig
from postgrad.errors import Unsupported
from postgrad.model.checkpoint_files import (
    File,
    Layout,
    TensorsFile,
    copy_to_host,
    part_path,
    read_own_part,
    read_tensors,
)
from postgrad.model.device import supports_triton
from postgrad.model.optimizers.optimizer import Optimizer
from postgrad.model.parallel.experts import count_experts, dispatch_experts
from postgrad.model.parallel.groups import REPLICATED, Division, division_of, set_division
from postgrad.model.parallel.meta_model import allocate_shards, fill_shards, tensors_of
from postgrad.model.parallel.rank_kernels import install_kernels_on_ranks
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.parallel.tensor_parallel import divide_model
from postgrad.model.views import find_blocks


class ForwardRoot(nn.Module):
    """A module whose forward is a forward pass of a port.

    FSDP then gathers what the pass reads outside of the blocks, such as the LM head.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)


def shard_model(
    model: Any,
    ranks: Ranks,
    compute: torch.dtype,
    masters: bool,
    float32_module: nn.Module | None = None,
) -> ForwardRoot:
    """Shard the model's blocks, then the rest; return the root that runs passes.

    With tensor or expert parallelism the blocks are divided into slices first. Expert parallelism
    leaves a model without experts as it is. On a device with Triton the shards then compute with
    its kernels.

    `masters` keeps the shards of trained parameters in float32. `float32_module` is sharded too
    and computes in float32, whatever the model's compute type is.
    """
    uses_kernels = supports_triton(ranks.device)
    if uses_kernels:  # a model that was loaded on the device has kernels on whole matrices
        from postgrad.model.kernels.install import remove_kernels

        remove_kernels(model)
    before = tensors_of(model)
    divisions: dict[str, Division] = {}
    has_experts = count_experts(model.config) > 0
    if ranks.tensor.size > 1:
        divisions = divide_model(model, ranks.tensor)
    elif ranks.expert.size > 1 and has_experts:
        divisions = dispatch_experts(model, ranks.expert)
    offload = OffloadPolicy()
    if ranks.offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu")

    def shard(module: nn.Module, dtype: torch.dtype, mesh: DeviceMesh | None = ranks.mesh) -> None:
        if masters:
            _convert_to_masters(module)
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            offload_policy=offload,
            reshard_after_forward=True,
        )

    dispatched = {name for name, division in divisions.items() if division.is_dispatched}
    for name in sorted({name.rpartition(".")[0] for name in dispatched}):
        shard(model.get_submodule(name), compute, ranks.expert_mesh)
    for block in find_blocks(model):
        shard(block, compute)
    content = model
    if float32_module is not None:
        shard(float32_module, torch.float32)
        content = nn.ModuleList([model, float32_module])
    root = ForwardRoot(content)
    shard(root, compute)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is weighted by global counts: gradients are summed, never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    must_fill = allocate_shards(root, before, ranks)
    for name, p in model.named_parameters():
        set_division(p, divisions.get(name, REPLICATED))
    if must_fill:
        fill_shards(model, before, ranks)
    # FSDP fixes its types in the first pass by what requires a gradient, which a loss or a view
    # may change later.
    root(lambda: None)
    if uses_kernels:
        install_kernels_on_ranks(root, model, ranks, compute)
    return root


def _convert_to_masters(module: nn.Module) -> None:
    for p in module.parameters():
        if not isinstance(p, DTensor) and p.requires_grad:
            p.data = p.data.float()


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
            raise Unsupported(
                "optimizer.kind=adamw_8bit cannot be sharded over ranks; use optimizer.kind=adamw, "
                "or cluster.offload=true to save memory"
            )
        if config.kind == "muon":
            raise Unsupported(
                "optimizer.kind=muon needs whole matrices and cannot be sharded over ranks; "
                "use optimizer.kind=adamw, or cluster.backend=local"
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
                self.masters[name].grad = self.ranks.sum_partial_gradient(local_tensor(p.grad), p)
                p.grad = None
        return super().has_gradients()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        by_name = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        return self.ranks.global_norm(by_name, self.sharded_params)

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards."""
        shards = super().tensors()
        if self.compute != torch.float32:
            shards |= {f"master/{name}": p for name, p in self.params.items()}
        return shards

    def layout(self) -> Layout:
        """Return where this rank's shards belong."""
        divisions: dict[str, list[Any]] = {}
        for name, p in self.sharded_params.items():
            if division_of(p).dim is not None:
                divisions[name] = list(division_of(p))
        tensor = self.ranks.tensor
        shard = self.ranks.shard
        expert = self.ranks.expert
        return Layout(tensor.rank, tensor.size, shard.rank, shard.size, divisions, expert.size)

    def files(self, file: Path) -> list[File]:
        """Return this rank's part of what save() writes; ranks with copies write none."""
        if not self.ranks.is_first_copy:
            return []
        layout = self.layout()
        path = part_path(file, layout.index, layout.num_files)
        return [TensorsFile(copy_to_host(self.tensors()), path, layout.to_metadata())]

    def read(self, file: Path) -> dict[str, Tensor]:
        """Return this rank's shards of the saved tensors; masters go into the shards at once."""
        shards = read_own_part(file, self.layout())
        if shards is None:
            shards = {}
            for key, tensor in read_tensors(file):
                parameter = self.sharded_params.get(key.partition("/")[2])
                if tensor.dim() and parameter is not None:
                    tensor = self.ranks.local_shard(tensor, parameter)
                shards[key] = tensor
        with torch.no_grad():
            for name, p in self.params.items():
                if f"master/{name}" in shards:
                    p.copy_(shards.pop(f"master/{name}"))
        return shards


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; it shares the DTensor's memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()
