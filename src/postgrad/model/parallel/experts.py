"""Expert parallelism: each rank of a group holds some of the experts of every block.

The ranks compute different rows: each token is sent to the ranks that hold its experts, and their
outputs are sent back (token dispatch). Tensor parallelism divides every expert instead.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.errors import Conflict, Unsupported
from postgrad.model.parallel.groups import (
    Division,
    Group,
    exchange,
    replace_parameter,
    sum_gradients,
    sum_outputs,
)

WEIGHTS: tuple[str, ...] = ("gate_up_proj", "down_proj")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of configurations


def count_experts(model_config: Any) -> int:
    """Return the number of experts per block, by the transformers configuration; 0 if none."""
    config = model_config.get_text_config()
    for name in COUNTS:
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 0


def num_experts_of(model: Any) -> int:
    """Return the number of experts per block. Raises ConfigError for a model without experts."""
    num_experts = count_experts(model.config)
    if not num_experts:
        model_type = model.config.get_text_config().model_type
        raise Unsupported(f"cluster.expert_parallel: {model_type} has no experts")
    return num_experts


def divide_experts(module: Any, group: Group) -> dict[str, Division]:
    """Slice every expert of one block for ranks that compute the same rows; outputs are summed."""
    divisions = {"gate_up_proj": Division(1, parts=2), "down_proj": Division(2)}
    for name, division in divisions.items():
        replace_parameter(module, name, division, group)

    def own_inputs(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = args
        # The router gets the gradients of the other ranks' slices, too.
        return sum_gradients(hidden, group), chosen, sum_gradients(weights, group)

    module.register_forward_pre_hook(own_inputs)
    module.register_forward_hook(lambda _, args, output: sum_outputs(output, group))
    return divisions


def _keep_own_experts(module: Any, group: Group) -> None:
    """Tell a module that it holds one rank's experts. Raises ConfigError."""
    if not hasattr(module, "_is_expert_parallel"):
        raise Unsupported(
            "cluster.expert_parallel needs a newer transformers, whose experts skip tokens of "
            "other ranks; set cluster.expert_parallel=1"
        )
    module.num_experts //= group.size
    module._is_expert_parallel = True


def _skip_other_experts(
    chosen: Tensor, weights: Tensor, group: Group, num_own: int
) -> tuple[Tensor, Tensor]:
    """Return choices and weights among this rank's experts; transformers skips number num_own."""
    local = chosen - group.rank * num_own
    is_own = (local >= 0) & (local < num_own)
    return local.where(is_own, num_own), weights.masked_fill(~is_own, 0.0)


# ---- token dispatch


def dispatch_experts(model: Any, group: Group) -> dict[str, Division]:
    """Give this rank its experts of every block; tokens are sent to the ranks of their experts.

    Returns the division by parameter name.

    Raises: ConfigError for a model whose experts cannot be divided so.
    """
    num_experts = num_experts_of(model)
    if num_experts % group.size:
        raise Conflict(
            f"cluster.expert_parallel={group.size} does not divide the model's {num_experts} "
            "experts"
        )
    divisions: dict[str, Division] = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        own = dict(module.named_parameters())
        if own.keys() != set(WEIGHTS):
            raise Unsupported(
                f"cluster.expert_parallel does not support the experts of "
                f"{model.config.get_text_config().model_type}, which have {', '.join(own)}"
            )
        _dispatch_to(module, group)
        divisions |= {f"{name}.{key}": Division(0, is_dispatched=True) for key in own}
    if not divisions:
        raise Unsupported("cluster.expert_parallel: no layer of the model has experts to divide")
    return divisions


def _dispatch_to(module: Any, group: Group) -> None:
    """Replace the experts of one block by this rank's, and let its forward exchange tokens."""
    _keep_own_experts(module, group)
    for name in WEIGHTS:
        replace_parameter(module, name, Division(0, is_dispatched=True), group)
    run_experts = module.forward

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        is_sent = tokens_by_owner(chosen, group.size, module.num_experts)
        tokens = is_sent.nonzero()[:, 1]  # those of the first owner, then of the second ...
        sent = is_sent.sum(1)
        received = group.exchange(sent, [1] * group.size, [1] * group.size)
        sizes = (sent.tolist(), received.tolist())
        own_chosen, own_weights = _skip_other_experts(
            group.exchange(chosen[tokens], *sizes),
            exchange(weights[tokens], group, *sizes),
            group,
            module.num_experts,
        )
        own_hidden = exchange(hidden[tokens], group, *sizes)
        outputs = _run_on_some_token(run_experts, own_hidden, own_chosen, own_weights)
        returned = exchange(outputs, group, sizes[1], sizes[0])
        # index_put adds in a fixed order on CUDA, index_add does not.
        return torch.zeros_like(hidden).index_put((tokens,), returned, accumulate=True)

    module.forward = forward


def tokens_by_owner(chosen: Tensor, num_ranks: int, num_own: int) -> Tensor:
    """Return which tokens each rank gets, (ranks, tokens): those that chose one of its experts.

    `chosen` has the experts of each token, (tokens, choices). A token is sent to a rank once, even
    if it chose several of that rank's experts.
    """
    owners = chosen // num_own
    ranks = torch.arange(num_ranks, device=chosen.device)[:, None, None]
    return (owners == ranks).any(-1)


def _run_on_some_token(run: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run this rank's experts. Without tokens, a token of zeros gives the experts zero gradients.

    FSDP2 would not reduce parameters without gradients here, and the other ranks would wait.
    """
    if len(hidden):
        return run(hidden, chosen, weights)
    zeros = hidden.new_zeros(1, hidden.shape[1])
    outputs = run(
        torch.cat([hidden, zeros]),
        chosen.new_zeros(1, chosen.shape[1]),
        torch.cat([weights, weights.new_zeros(1, weights.shape[1])]),
    )
    return outputs[:0]
