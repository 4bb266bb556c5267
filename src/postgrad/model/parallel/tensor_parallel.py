"""Tensor parallelism: each rank of a group holds slices of the blocks' matrices.

All ranks of the group compute the same rows. The slices follow the plan that transformers has for
the type of model. Embedding and head are divided by ids; norms are replicated. FSDP2 then
shards the slices over the other ranks.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from postgrad.errors import Conflict, Unsupported
from postgrad.model.lora import ADAPTER_NAME, base_layer
from postgrad.model.parallel.experts import divide_experts
from postgrad.model.parallel.groups import (
    Division,
    Group,
    gather_last,
    replace_parameter,
    slice_last,
    sum_gradients,
    sum_outputs,
)
from postgrad.model.passes.vocabulary import VocabularySlice, set_vocabulary

# Model types whose slices give the numbers of one process (tests/model/test_parallel.py).
FAMILIES = (
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
EXPERTS = "moe_tp_experts"  # the rule of a plan for experts
# Norms over heads that the plan of transformers leaves out: those of Phi with qk_layernorm.
MORE_RULES = {
    "model.layers.*.self_attn.q_layernorm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_layernorm": "replicated_with_grad_allreduce",
}


def divide_model(model: Any, group: Group) -> dict[str, Division]:
    """Replace the model's matrices by this rank's slices; return the division by parameter name.

    Raises: ConfigError for a model that cannot be divided so.
    """
    _check_model(model, group)
    divisions: dict[str, Division] = {}
    inputs = SharedInputs(group)
    plan = MORE_RULES | dict(model.tp_plan)
    by_id = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in list(model.named_modules()):
        style = _style_of(plan, name)
        if style is None or module in by_id:
            continue
        if style == EXPERTS:
            own = divide_experts(module, group)
        elif style in LINEAR_STYLES:
            own = LINEAR_STYLES[style](base_layer(module), group, inputs)
            if module is not base_layer(module):
                own = {f"base_layer.{key}": division for key, division in own.items()}
                own |= _divide_adapter(module, style, group)
        else:
            raise Unsupported(f"cluster.tensor_parallel does not support {name} ({style})")
        divisions |= {f"{name}.{key}": division for key, division in own.items()}
    return divisions | _divide_vocabulary(model, group)


def _check_model(model: Any, group: Group) -> None:
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise Unsupported(
            f"cluster.tensor_parallel was not tested with model type {config.model_type}; it works "
            f"with {', '.join(FAMILIES)}"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
    }
    for what, size in sizes.items():
        if size % group.size:
            raise Conflict(
                f"cluster.tensor_parallel={group.size} does not divide the model's {size} {what}"
            )


def _style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the rule of the plan for a module; layer numbers are wildcards in the plan."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


# ---- linear layers


class SharedInputs:
    """Inputs of column-wise layers, wrapped once where several layers read the same tensor.

    The gradients of q, k and v are then added before they are summed over the ranks. The tensor is
    kept until the row-wise layer after them runs.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.last: Tensor | None = None
        self.last_wrapped: Tensor | None = None

    def wrap(self, x: Tensor) -> Tensor:
        if self.last is not x or self.last_wrapped is None:
            self.last = x
            self.last_wrapped = sum_gradients(x, self.group)
        return self.last_wrapped

    def clear(self) -> None:
        self.last = self.last_wrapped = None


def _divide_columns(module: Any, group: Group, inputs: SharedInputs) -> dict[str, Division]:
    """Keep this rank's outputs of a linear layer; every rank has the full input."""
    divisions = _slice_parameters(module, {"weight": 0, "bias": 0}, group)
    module.register_forward_pre_hook(lambda _, args: (inputs.wrap(args[0]), *args[1:]))
    return divisions


def _divide_columns_and_gather(
    module: Any, group: Group, inputs: SharedInputs
) -> dict[str, Division]:
    """Keep this rank's outputs of a linear layer; all outputs are gathered after it."""
    divisions = _divide_columns(module, group, inputs)
    module.register_forward_hook(lambda _, args, output: gather_last(output, group))
    return divisions


def _divide_rows(module: Any, group: Group, inputs: SharedInputs) -> dict[str, Division]:
    """Keep this rank's inputs of a linear layer; the outputs are summed over the ranks."""
    divisions = _slice_parameters(module, {"weight": 1}, group)
    module.register_forward_pre_hook(lambda _, args: inputs.clear())
    if module.bias is None:
        module.register_forward_hook(lambda _, args, output: sum_outputs(output, group))
        return divisions

    def forward(x: Tensor) -> Tensor:
        return sum_outputs(functional.linear(x, module.weight), group) + module.bias

    module.forward = forward
    return divisions


def _divide_rows_and_input(module: Any, group: Group, inputs: SharedInputs) -> dict[str, Division]:
    """Keep this rank's inputs of a linear layer whose input every rank has in full."""
    divisions = _divide_rows(module, group, inputs)
    module.register_forward_pre_hook(lambda _, args: (slice_last(args[0], group), *args[1:]))
    return divisions


def _mark_partial(module: Any, group: Group, inputs: SharedInputs) -> dict[str, Division]:
    """Replicate a norm over heads; each rank's gradient is that of its own heads."""
    return {name: Division(partial_gradient=True) for name, _ in module.named_parameters()}


Divide = Callable[[Any, Group, SharedInputs], dict[str, Division]]
LINEAR_STYLES: dict[str, Divide] = {
    "colwise": _divide_columns,
    "colwise_gather_output": _divide_columns_and_gather,
    "rowwise": _divide_rows,
    "rowwise_split_input": _divide_rows_and_input,
    "replicated_with_grad_allreduce": _mark_partial,
}


def _divide_adapter(module: Any, style: str, group: Group) -> dict[str, Division]:
    """Slice a layer's LoRA matrices as the layer is; the ranks exchange the few values between.

    The first matrix then gives all ranks the same values, so replicated matrices have full
    gradients.
    """
    first = module.lora_A[ADAPTER_NAME]
    second = module.lora_B[ADAPTER_NAME]
    divisions: dict[str, Division] = {}
    if style.startswith("colwise"):
        divisions |= _slice_parameters(second, {"weight": 0}, group)
        first.register_forward_hook(lambda _, args, output: sum_gradients(output, group))
        name = f"lora_B.{ADAPTER_NAME}"
    else:
        divisions |= _slice_parameters(first, {"weight": 1}, group)
        first.register_forward_hook(lambda _, args, output: sum_outputs(output, group))
        name = f"lora_A.{ADAPTER_NAME}"
    if style == "colwise_gather_output":
        second.register_forward_hook(lambda _, args, output: gather_last(output, group))
    if style == "rowwise_split_input":
        first.register_forward_pre_hook(lambda _, args: (slice_last(args[0], group), *args[1:]))
    return {f"{name}.{key}": division for key, division in divisions.items()}


def _slice_parameters(module: Any, dims: dict[str, int], group: Group) -> dict[str, Division]:
    divisions: dict[str, Division] = {}
    for name, dim in dims.items():
        if getattr(module, name, None) is not None:
            divisions[name] = Division(dim)
            replace_parameter(module, name, divisions[name], group)
    return divisions


# ---- embedding and head


def _divide_vocabulary(model: Any, group: Group) -> dict[str, Division]:
    """Keep this rank's ids of the embedding and the head, which may be one tied matrix."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    num_ids = len(head.weight)
    division = Division(0, padding=-num_ids % group.size)
    size = (num_ids + division.padding) // group.size
    if division.padding >= size:
        raise Conflict(
            f"cluster.tensor_parallel={group.size} leaves no id of the vocabulary of {num_ids} to "
            "the last worker; use fewer"
        )
    by_id = (embedding.weight, head.weight, head.bias)
    names = [name for name, p in model.named_parameters() if any(p is weight for weight in by_id)]
    first = group.rank * size
    vocabulary = VocabularySlice(group, first, min(size, num_ids - first), num_ids)
    replace_parameter(embedding, "weight", division, group)
    if is_tied:
        head.weight = embedding.weight
    else:
        replace_parameter(head, "weight", division, group)
    if head.bias is not None:
        replace_parameter(head, "bias", division, group)
    _embed_own_ids(embedding, vocabulary)
    set_vocabulary(model, vocabulary)
    return dict.fromkeys(names, division)


def _embed_own_ids(embedding: Any, vocabulary: VocabularySlice) -> None:
    """Let an embedding look up this rank's ids; the outputs are summed over the ranks."""
    look_up = embedding.forward
    if embedding.padding_idx is not None:
        own = int(vocabulary.local_ids(torch.tensor(embedding.padding_idx)))
        embedding.padding_idx = own if own >= 0 else None

    def forward(ids: Tensor) -> Tensor:
        local = vocabulary.local_ids(ids)
        outputs = look_up(local.clamp(min=0)).masked_fill((local < 0)[..., None], 0.0)
        return sum_outputs(outputs, vocabulary.group)

    embedding.forward = forward
