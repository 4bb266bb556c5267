"""The Triton kernels of a sharded model, and the check that its passes give the stock numbers.

The numeric gate (gate.py) runs where a model is loaded: for sharded models in host memory, with the
CPU's passes. Ranks on devices with Triton run other kernels, on shards, slices and parts of the
tokens. So their passes are compared again after sharding, with the stock modules on the same ranks.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.errors import Unsupported
from postgrad.model.load.gate import disagreement, probe_rows
from postgrad.model.parallel.ranks import Ranks, divide_tokens
from postgrad.model.passes.head import model_outputs
from postgrad.model.passes.layout import MicroBatch, make_micro_batches_of_kind
from postgrad.model.passes.support import (
    PassKind,
    eval_mode,
    set_attention,
    set_support,
    support_of,
)
from postgrad.model.views import pass_states

STOCK_ATTENTION = "eager"  # every architecture has it
TOKEN_BUDGET = 4096


def install_kernels_on_ranks(
    root: nn.Module, model: Any, ranks: Ranks, compute: torch.dtype
) -> None:
    """Let the modules of a sharded model compute with the kernels. A collective.

    If the numbers are then not those of the stock modules, these are used again.

    Raises: ConfigError if the passes differ from the stock model's with stock modules, too.
    """
    from postgrad.model.kernels.install import install_kernels, remove_kernels

    support = support_of(model)
    own_attention = model.config._attn_implementation
    set_attention(model, STOCK_ATTENTION)
    stock = _probe_logprobs(root, model, ranks, "rows")
    set_attention(model, own_attention)

    def find_difference() -> str:
        own = _probe_logprobs(root, model, ranks, support.passes)
        reason = disagreement(own, stock, compute, support.rounding)
        is_found = ranks.all_reduce_max(int(bool(reason)))
        return (reason or "another worker's log-probs differ") if is_found else ""

    install_kernels(model, fuse=False)
    reason = find_difference()
    if not reason:
        return
    remove_kernels(model)
    set_support(model, dataclasses.replace(support, reasons=(*support.reasons, reason)))
    if reason := find_difference():
        raise Unsupported(
            f"{type(model).__name__}: the passes on this mesh of workers are not those of the "
            f"stock model: {reason}; use another mesh or cluster.backend=local",
            at="cluster.backend",
        )


@torch.no_grad()
def _probe_logprobs(root: nn.Module, model: Any, ranks: Ranks, kind: PassKind) -> Tensor:
    """Return (tokens,) log-probs of the gate's rows, which every rank computes. A collective."""
    batch = probe_rows(model)

    def run(micro: MicroBatch, targets: Tensor) -> Tensor:
        hidden = pass_states(model, micro)
        return model_outputs(model, hidden.flatten(0, 1)[micro.gather], targets).logprobs

    def run_divided(micro: MicroBatch, targets: Tensor) -> Tensor:
        own = divide_tokens(micro, ranks.sequence)
        return own.join(run(own.micro, targets[own.predicted]), ranks.sequence)

    is_divided = kind == "packed" and ranks.sequence.size > 1
    logprobs = torch.zeros(batch.num_tokens)
    with eval_mode(model):
        for micro in make_micro_batches_of_kind(
            kind, batch, TOKEN_BUDGET, model, device=ranks.device
        ):
            where = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            targets = batch.response.values[where].to(ranks.device)
            values = root(run_divided if is_divided else run, micro.to(ranks.device), targets)
            logprobs[where] = values.float().cpu()
    return logprobs
