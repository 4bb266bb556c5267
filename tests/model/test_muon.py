"""Muon: orthogonal steps for the blocks' matrices, AdamW for the rest, saved and continued."""

import pytest
import torch
from refused import refused
from tiny_runs import config_of, random_batch
from torch import nn

from postgrad.cluster.host import build_host
from postgrad.config.schema import OptimizerConfig
from postgrad.errors import RunError
from postgrad.model.load.load import load
from postgrad.model.optimizers.muon import matrix_names
from postgrad.model.optimizers.optimizer import Optimizer
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.parallel.sharding import ShardedOptimizer

CPU = torch.device("cpu")


class Net(nn.Module):
    """An embedding, one block with a matrix and a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 8)])
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.embed(ids)))


def test_matrices_of_the_blocks_take_muons_step_and_the_rest_adamws():
    config = OptimizerConfig(
        kind="muon", lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1, max_grad_norm=0.0
    )
    ours, theirs = Net(), Net()
    optimizer = Optimizer(ours, config)
    muon = torch.optim.Muon(
        [theirs.blocks[0].weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = [theirs.embed.weight, theirs.blocks[0].bias, theirs.head.weight]
    adam = torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step in range(1, 4):
        ids = torch.tensor([step, 1, 4])
        for net in (ours, theirs):
            net(ids).square().sum().backward()
        optimizer.step(1e-2 / step)
        for reference in (muon, adam):
            for group in reference.param_groups:
                group["lr"] = 1e-2 / step
            reference.step()
            reference.zero_grad()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)


def test_the_step_of_a_matrix_has_equal_singular_values():
    """By hand: the step of G = diag(8, 1) is near lr · 0.2 · sqrt(2) · I, as U·Vᵀ of it is I.

    Five Newton-Schulz iterations bring singular values into 0.68 to 1.14 (Jordan et al. 2024).
    AdamW's step, lr for each entry with a gradient, has the size lr in both directions.
    """

    class Diagonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2, bias=False)])

    net = Diagonal()
    weight = net.blocks[0].weight
    before = weight.detach().clone()
    config = OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.0, max_grad_norm=0.0)
    optimizer = Optimizer(net, config)
    (weight * torch.diag(torch.tensor([8.0, 1.0]))).sum().backward()
    optimizer.step(0.1)
    step = (before - weight.detach()) / (0.1 * 0.2 * 2**0.5)
    assert abs(float(step[0, 1])) < 1e-2 and abs(float(step[1, 0])) < 1e-2
    assert 0.65 < float(step[0, 0]) < 1.16 and 0.65 < float(step[1, 1]) < 1.16


def test_embeddings_norms_and_heads_are_not_muons(tiny):
    config = config_of("grpo", tiny)
    names = matrix_names(load(config.model, CPU).model)
    kinds = {name.rpartition("layers.")[2].split(".", 1)[1] for name in names}
    assert kinds == {
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    }


@pytest.mark.slow
def test_adapters_are_saved_and_continue_bit_for_bit(tiny, tmp_path):
    overrides = ("optimizer.kind=muon", "optimizer.lr=1e-2", "model.lora.rank=2")
    config = config_of("grpo", tiny, *overrides)
    one = build_host(config).policy
    assert {"momentum_buffer"} == {
        key
        for step in (1, 2)
        for _ in [one.update(random_batch(step), step)]
        for state in one.optimizer.adam.state.values()
        for key in state
    }
    one.save(str(tmp_path))
    two = build_host(config).policy
    two.load(str(tmp_path))
    for policy in (one, two):
        policy.update(random_batch(3), 3)
    first, second = one.optimizer.tensors(), two.optimizer.tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_state_of_another_kind_is_refused(tmp_path):
    adam = Optimizer(Net(), OptimizerConfig())
    adam.params["embed.weight"].sum().backward()
    adam.params["blocks.0.weight"].sum().backward()
    adam.step(1e-3)
    adam.save(tmp_path / "adam.safetensors")
    with pytest.raises(RunError, match=r"optimizer\.kind=muon"):
        Optimizer(Net(), OptimizerConfig(kind="muon")).load(tmp_path / "adam.safetensors")


def test_shards_are_refused():
    with refused("unsupported", "optimizer.kind"):
        ShardedOptimizer(Net(), OptimizerConfig(kind="muon"), Ranks.__new__(Ranks), torch.float32)
