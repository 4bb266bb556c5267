"""Muon for the weight matrices of the blocks, AdamW for all other parameters.

Muon takes the momentum of a matrix's gradient, M, and steps along the nearest matrix with
orthonormal rows or columns, U·Vᵀ of M = U·Σ·Vᵀ. The step is scaled by 0.2·sqrt(max(rows, columns)),
so its size per weight is that of AdamW, and one learning rate serves both (Liu et al. 2025).
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.config.schema import OptimizerConfig
from postgrad.model.views import find_blocks


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates: the matrices of the blocks.

    Embeddings, heads, norms and biases are not among them, nor experts that are stacked in one
    tensor with three dimensions. LoRA adapters are matrices too.
    """
    matrices = {id(p) for block in find_blocks(model) for p in block.parameters() if p.dim() == 2}
    return {name for name, p in model.named_parameters() if id(p) in matrices}


class MuonWithAdamW:
    """torch's Muon and AdamW with one list of parameter groups and one table of states.

    Groups with `matrices` true are Muon's.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        matrices = [group for group in groups if group["matrices"]]
        others = [group for group in groups if not group["matrices"]]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            beta1, beta2 = config.betas
            self.optimizers.append(
                torch.optim.AdamW(
                    others,
                    lr=config.lr,
                    betas=(beta1, beta2),
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                )
            )
        # No parameter has two optimizers, so their states can be in one table.
        self.state: dict[Tensor, Any] = self.optimizers[0].state
        for optimizer in self.optimizers[1:]:
            optimizer.state = self.optimizers[0].state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        with warnings.catch_warnings():
            # Muon multiplies in bfloat16; a CPU without it falls back, with a long warning.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            for optimizer in self.optimizers:
                optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
