"""`postgrad doctor --fit RECIPE cluster=ray ...`: memory per device of a mesh of workers.

Everything is computed from the model's configuration; no weights are loaded. docs/scale.md has the
formulas.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from postgrad.config.schema import ClusterConfig, Config
from postgrad.doctor.report import Report, gib
from postgrad.errors import ConfigError
from postgrad.model.experts import dispatch_experts
from postgrad.model.groups import Group
from postgrad.model.load import model_config
from postgrad.model.muon import find_blocks
from postgrad.model.passes.layout import EAGER_GPU_TOKENS
from postgrad.model.ranks import check_mesh
from postgrad.model.tensor_parallel import divide_model
from postgrad.sizing.simulate import build_model
from postgrad.training import prepare

HEAD_BYTES = 3 * 2**29  # one chunk of logits, forward and backward
# Bytes of activations per token and unit of width, of one block in bfloat16: what every worker of
# a tensor-parallel group holds, and what is divided over the group.
WHOLE_ACTIVATIONS = 10
DIVIDED_ACTIVATIONS = 24
MAX_PROPOSALS = 3
SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class MeshMemory:
    """Bytes on one device, by what holds them."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Counts:
    """Parameters of one worker of a tensor- or expert-parallel group."""

    parameters: int  # what FSDP2 shards over the workers with the same slices
    largest_block: int  # what a worker computes with, as are those outside
    outside_blocks: int  # embedding, head and final norm


def count_parameters(config: Config, model: Any) -> Counts:
    """Count the parameters of one worker's slices on the meta device, which takes no memory.

    Raises: ConfigError for a model that cannot be divided so.
    """
    cluster = config.cluster
    with torch.device("meta"):
        built = build_model(config, model)
    if cluster.tensor_parallel > 1:
        group = Group(0, cluster.tensor_parallel)
        divide_model(built, group, cluster.expert_parallel > 1)
    total = count(built)
    outside = total - sum(count(block) for block in find_blocks(built))
    if cluster.tensor_parallel == 1 and cluster.expert_parallel > 1:
        # Each worker computes with its own experts; all workers together still shard all of them.
        dispatch_experts(built, Group(0, cluster.expert_parallel))
    return Counts(total, max(count(block) for block in find_blocks(built)), outside)


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def estimate_mesh(config: Config, model: Any) -> MeshMemory:
    """Return the memory of one worker that trains; engines of their own are not counted."""
    cluster = config.cluster
    check_mesh(cluster.workers, cluster)
    counts = count_parameters(config, model)
    text = model.get_text_config()
    width = int(text.hidden_size)
    blocks = int(text.num_hidden_layers)
    each = 4 if config.model.dtype == "float32" else 2
    shards = cluster.shard_workers or cluster.workers // cluster.tensor_parallel
    budget = config.training.token_budget or EAGER_GPU_TOKENS
    tokens = budget // cluster.sequence_parallel
    per_token = width * (WHOLE_ACTIVATIONS + DIVIDED_ACTIVATIONS / cluster.tensor_parallel)
    activations = tokens * per_token * (each / 2)
    if config.model.activation_checkpointing:
        activations += tokens * width * each * blocks
    else:
        activations *= blocks
    parts = {
        "weights, Adam, gradients": 0 if cluster.offload else 16 * counts.parameters // shards,
        "gathered weights": each * (2 * counts.largest_block + counts.outside_blocks),
        "gradients in flight": (each + 4) * (counts.largest_block + counts.outside_blocks),
        "activations": round(activations),
        "head": HEAD_BYTES,
    }
    if not cluster.engines and config.rollout.engine != "http":
        whole = each * _whole_parameters(config, model)
        parts["engine beside"] = whole // config.rollout.tensor_parallel
    return MeshMemory(parts)


def _whole_parameters(config: Config, model: Any) -> int:
    with torch.device("meta"):
        return count(build_model(config, model))


def propose_meshes(config: Config, model: Any, available: int) -> list[ClusterConfig]:
    """Return meshes of the same number of workers that fit, the least communication first."""
    proposals: list[ClusterConfig] = []
    for sequence in SIZES:
        for tensor in SIZES:
            cluster = replace(
                config.cluster,
                tensor_parallel=tensor,
                sequence_parallel=sequence,
                expert_parallel=1,
                shard_workers=0,
            )
            try:
                memory = estimate_mesh(replace(config, cluster=cluster), model)
            except ConfigError:
                continue
            if memory.total <= available:
                proposals.append(cluster)
    proposals.sort(key=lambda c: (c.tensor_parallel * c.sequence_parallel, c.sequence_parallel))
    return proposals[:MAX_PROPOSALS]


def describe_mesh(config: Config, device_gib: float) -> Report:
    """Return the memory per device of the run's mesh, and meshes that fit, as rows."""
    config = prepare.make_method(config).config
    model = model_config(config.model, config.seed)
    cluster = config.cluster
    memory = estimate_mesh(config, model)
    available = round(device_gib * 2**30)
    report = Report()
    data = cluster.workers // (cluster.tensor_parallel * cluster.sequence_parallel)
    sizes = f"data {data} x sequence {cluster.sequence_parallel} x tensor {cluster.tensor_parallel}"
    report.add("mesh", f"{cluster.workers} workers: {sizes}")
    fits = memory.total <= available
    proposals = propose_meshes(config, model, available)
    problem = ""
    if not fits:
        problem = f"{gib(memory.total)} per device needed, {device_gib:g} GiB available: "
        problem += "use one of the meshes above" if proposals else _advice(config)
    verdict = f"{device_gib:g} GiB: {'fits' if fits else 'DOES NOT FIT'}"
    report.add("memory per device", f"{gib(memory.total)} of {verdict}", problem)
    for name, size in memory.parts.items():
        report.add(f"  {name}", f"{gib(size):>10}")
    for number, proposal in enumerate(proposals):
        words = f"cluster.tensor_parallel={proposal.tensor_parallel} "
        words += f"cluster.sequence_parallel={proposal.sequence_parallel}"
        report.add("meshes that fit" if number == 0 else "", words)
    report.add("estimated by", "formulas of docs/scale.md; nothing was measured on devices")
    return report


def _advice(config: Config) -> str:
    changes = []
    if not config.model.activation_checkpointing:
        changes.append("model.activation_checkpointing=true")
    if not config.cluster.engines:
        changes.append("cluster.engines=N (engines on devices of their own)")
    changes.append("more workers")
    return ", ".join(changes)
