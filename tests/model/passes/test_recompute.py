"""Chunked MLPs change neither log-probs nor gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import config_of, random_batch
from torch import nn

from postgrad.cluster.host import build_host
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes import recompute

CPU = torch.device("cpu")


def gradients_of(host, batch) -> dict[str, torch.Tensor]:
    """Run the passes of an update without its optimizer step."""
    policy = host.policy
    prepared = policy.objective.prepare(batch)
    policy.accumulate(prepared, policy.objective.view(1), MetricAccumulator())
    return {name: m.grad.clone() for name, m in policy.optimizer.masters.items()}


def checkpointed_host(tiny):
    return build_host(config_of("grpo", tiny, "model.activation_checkpointing=true"))


def count_tokens(policy: Any) -> list[int]:
    """Returns a list that gets the tokens of every call of an MLP."""
    sizes: list[int] = []
    for block in policy.model.base_model.layers:
        inner = block.mlp.forward

        def counted(hidden_states, inner=inner):
            sizes.append(hidden_states.flatten(0, -2).shape[0])
            return inner(hidden_states)

        block.mlp.forward = counted
    return sizes


@pytest.mark.parametrize("grad", [True, False])
def test_chunked_mlps_compute_the_same(tiny, grad):
    plain = checkpointed_host(tiny)
    chunked = checkpointed_host(tiny)
    plain_sizes, sizes = (count_tokens(host.policy) for host in (plain, chunked))
    recompute.chunk_mlps(chunked.policy.model, chunk_tokens=5)
    batch = random_batch(3)
    if grad:
        expected = gradients_of(plain, batch)
        for name, gradient in gradients_of(chunked, batch).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    else:
        logprobs = [h.policy.logprobs(batch)["logprobs"] for h in (plain, chunked)]
        torch.testing.assert_close(*logprobs, rtol=1e-6, atol=1e-6)
    assert max(sizes) == 5
    assert sum(sizes) == sum(plain_sizes), "chunks are not computed more often"


class Mlp(nn.Module):
    """An MLP of one value per token."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x)


def test_chunks_of_an_input_without_gradient_train_the_mlp():
    mlp = Mlp()
    block = SimpleNamespace(mlp=mlp)
    recompute.chunk_mlps(SimpleNamespace(base_model=SimpleNamespace(layers=[block])), 5)
    mlp(torch.full((1, 12, 1), 2.0)).sum().backward()
    assert mlp.down_proj.weight.grad.item() == 24.0
    mlp.down_proj.weight.requires_grad_(False)
    assert not mlp(torch.ones(1, 12, 1)).requires_grad
