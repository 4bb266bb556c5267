"""The memory of one worker of a mesh, from the model's configuration.

docs/scale.md has the formulas. Parameters are counted on the meta device, which takes no memory.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.model.device import DTYPES
from postgrad.model.experts import count_experts, dispatch_experts
from postgrad.model.groups import Group
from postgrad.model.lora import add_adapters
from postgrad.model.muon import find_blocks
from postgrad.model.passes.layout import EAGER_GPU_TOKENS
from postgrad.model.passes.support import packing_problem
from postgrad.model.ranks import SHARDED_KINDS, check_mesh, mesh_of_models
from postgrad.model.tensor_parallel import divide_model
from postgrad.rollout.kinds import find_engine
from postgrad.sizing.gpu_memory import Widths
from postgrad.sizing.plan import AVERAGED_WEIGHTS, SHARED_WEIGHTS
from postgrad.sizing.simulate import ModelSize, build_model, measure_size
from postgrad.sizing.traffic import Mesh, SentSizes

HEAD_BYTES = 3 * 2**29  # one chunk of logits, forward and backward
STATE_BYTES = 16  # per trained parameter: float32 shard, two moments of Adam, gradient
# Bytes of activations per token and unit of width, of one block in bfloat16: what every worker of
# a tensor-parallel group holds, and what is divided over the group.
WHOLE_ACTIVATIONS = 10
DIVIDED_ACTIVATIONS = 24

Roles = dict[str, tuple[str, Any]]  # name -> (kind, transformers configuration)


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
    trained: int  # of them: all, or those of LoRA adapters
    largest_block: int  # what a worker computes with, as are those outside
    outside_blocks: int  # embedding, head and final norm
    experts: int  # of all workers together, if tokens are sent to them


def count_parameters(config: Config, model: Any, adapters: bool = True) -> Counts:
    """Count the parameters of one worker's slices.

    Args:
        config: of the run.
        model: transformers configuration.
        adapters: add LoRA adapters if the configuration has them.

    Raises: ConfigError for a model that cannot be divided so.
    """
    cluster = config.cluster
    divides_experts = cluster.expert_parallel > 1 and count_experts(model) > 0
    with torch.device("meta"):
        built = build_model(config, model)
        if adapters and config.model.lora.rank:
            add_adapters(built, config.model.lora, 0)
    if cluster.tensor_parallel > 1:
        divide_model(built, Group(0, cluster.tensor_parallel), divides_experts)
    total = count(built)
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    outside = total - sum(count(block) for block in find_blocks(built))
    experts = 0
    if cluster.tensor_parallel == 1 and divides_experts:
        # Each worker computes with its own experts; all workers together still shard all of them.
        experts = sum(p.numel() for name, p in built.named_parameters() if ".experts." in name)
        dispatch_experts(built, Group(0, cluster.expert_parallel))
    largest = max(count(block) for block in find_blocks(built))
    return Counts(total, trained, largest, outside, experts)


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def sent_sizes(config: Config, model: Any, counts: Counts) -> SentSizes:
    """Return the sizes that the traffic of a model follows from."""
    text = model.get_text_config()
    widths = Widths.of(model)
    return SentSizes(
        parameters=counts.parameters,
        trained=counts.trained,
        experts=counts.experts,
        blocks=int(text.num_hidden_layers),
        hidden=widths.hidden,
        heads=widths.query + widths.key,
        itemsize=DTYPES[config.model.dtype].itemsize,
        num_experts=count_experts(model),
        chosen_experts=int(getattr(text, "num_experts_per_tok", 0) or 0),
    )


@dataclass
class MeshSizes:
    """Counts the parameters of each model and division once, however many meshes are compared.

    The models and their settings must stay the same.
    """

    counted: dict[tuple[Any, ...], Counts] = field(default_factory=dict)
    measured: dict[tuple[int, bool], ModelSize] = field(default_factory=dict)

    def count(self, config: Config, model: Any, adapters: bool = True) -> Counts:
        cluster = config.cluster
        key = (id(model), cluster.tensor_parallel, cluster.expert_parallel, adapters)
        if key not in self.counted:
            self.counted[key] = count_parameters(config, model, adapters)
        return self.counted[key]

    def measure(self, config: Config, model: Any, adapters: bool = True) -> ModelSize:
        """Return the size of the model that is not divided."""
        key = (id(model), adapters)
        if key not in self.measured:
            self.measured[key] = measure_size(config, model, adapters)
        return self.measured[key]


def check_model_mesh(config: Config, model: Any, num_workers: int, is_pool: bool = False) -> Mesh:
    """Return the mesh of one model. Raises ConfigError if a run would refuse it."""
    cluster = mesh_of_models(config.cluster, num_workers, [model], is_pool)
    check_mesh(num_workers, cluster)
    mesh = Mesh.of(cluster, num_workers)
    if mesh.sequence > 1:
        text = model.get_text_config()
        if problem := packing_problem(SimpleNamespace(config=model)):
            raise ConfigError(f"cluster.sequence_parallel={mesh.sequence}: {problem}")
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        if heads % (mesh.sequence * mesh.tensor):
            raise ConfigError(
                f"cluster.sequence_parallel x cluster.tensor_parallel = "
                f"{mesh.sequence * mesh.tensor} does not divide the model's {heads} key-value heads"
            )
    return mesh


def estimate_mesh(
    config: Config, model: Any, roles: Roles | None = None, sizes: MeshSizes | None = None
) -> MeshMemory:
    """Return the memory of one of the policy's workers; engines of their own are not counted.

    Args:
        config: of the run.
        model: transformers configuration of the policy.
        roles: the other models; those with a pool of their own are not counted.
        sizes: counts of earlier calls.

    Raises: ConfigError for a mesh that a run would refuse.
    """
    sizes = sizes or MeshSizes()
    cluster = config.cluster
    mesh = check_model_mesh(config, model, cluster.workers)
    counts = sizes.count(config, model)
    each = DTYPES[config.model.dtype].itemsize
    state = STATE_BYTES * counts.trained + each * (counts.parameters - counts.trained)
    parts = {
        "weights, Adam, gradients": 0 if cluster.offload else state // mesh.shards,
        "gathered weights": each * (2 * counts.largest_block + counts.outside_blocks),
        "gradients in flight": _gradient_bytes(model, mesh, counts, each),
        "activations": _activation_bytes(config, model, mesh, each),
        "head": HEAD_BYTES,
    }
    for name, (kind, role_model) in (roles or {}).items():
        if name not in cluster.pools:
            parts[name] = _role_bytes(config, kind, role_model, each, sizes)
    if not cluster.engines and not find_engine(config.rollout.engine).remote:
        parts["engine beside"] = each * sizes.measure(config, model, adapters=False).parameters
        parts["engine beside"] //= config.rollout.tensor_parallel
    return MeshMemory({name: size for name, size in parts.items() if size})


def _gradient_bytes(model: Any, mesh: Mesh, counts: Counts, each: int) -> int:
    """Return the gradients of one block and of embedding and head until they are reduced.

    They exist in the compute type and in float32; the head's is summed in float32 before.
    """
    text = model.get_text_config()
    if counts.trained < counts.parameters:  # LoRA
        return (each + 4) * counts.trained // int(text.num_hidden_layers)
    head_sum = 4 * int(text.vocab_size) * int(text.hidden_size) // mesh.tensor if each < 4 else 0
    return (each + 4) * (counts.largest_block + counts.outside_blocks) + head_sum


def _activation_bytes(config: Config, model: Any, mesh: Mesh, each: int) -> int:
    text = model.get_text_config()
    width = int(text.hidden_size)
    blocks = int(text.num_hidden_layers)
    tokens = (config.training.token_budget or EAGER_GPU_TOKENS) // mesh.sequence
    per_token = width * (WHOLE_ACTIVATIONS + DIVIDED_ACTIVATIONS / mesh.tensor)
    activations = tokens * per_token * (each / 2)
    if config.model.activation_checkpointing:
        return round(activations + tokens * width * each * blocks)
    return round(activations * blocks)


def _role_bytes(config: Config, kind: str, model: Any, each: int, sizes: MeshSizes) -> int:
    """Return what a model besides the policy holds on one worker."""
    if kind == SHARED_WEIGHTS:
        return 0
    if kind not in (*SHARDED_KINDS, AVERAGED_WEIGHTS):
        return each * sizes.measure(config, model, adapters=False).parameters
    mesh = check_model_mesh(config, model, config.cluster.workers)
    if config.cluster.offload:
        return 0
    per_parameter = {"critic": STATE_BYTES, AVERAGED_WEIGHTS: 4}.get(kind, each)
    return per_parameter * sizes.count(config, model, adapters=False).parameters // mesh.shards
