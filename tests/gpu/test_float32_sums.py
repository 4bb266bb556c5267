"""Products that add bfloat16 weight gradients to float32 sums, on a GPU."""

import pytest
import torch
from llama import make_llama
from test_graphs import make_batch, make_policy

from postgrad.model.metrics import MetricAccumulator
from postgrad.model.optimizers.gradient_sums import add_product, gradient_sums, has_master

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("shape", [(300, 64, 192), (8192, 256, 1024), (7, 96, 33)])
def test_the_product_adds_in_float32(shape):
    tokens, width, outputs = shape
    torch.manual_seed(0)
    grad, x = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (outputs, width))
    total = torch.randn(2 * outputs, width, device="cuda")
    part = total[outputs:]
    expected = part.double() + grad.double().T @ x.double()
    before = total[:outputs].clone()
    add_product(part, grad.T, x)
    torch.testing.assert_close(part.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(total[:outputs], before)


@pytest.mark.parametrize(
    "options",
    [(), ("model.activation_checkpointing=true",), ("optimizer.kind=adamw_offloaded",)],
    ids=["kept", "recomputed", "offloaded"],
)
def test_gradients_are_nearer_to_float32_than_rounded_ones(tmp_path, options):
    folder = make_llama(tmp_path / "llama")
    grads = {}
    for name in ("exact", "rounded", "added"):
        dtype = "float32" if name == "exact" else "bfloat16"
        policy = make_policy(folder, "grpo", dtype, *options)
        policy.graph_cache.enabled = False
        masters = policy.optimizer.masters_by_id()
        trained = [p for p in policy.model.parameters() if p.dim() == 2]
        assert all(has_master(p) == (dtype == "bfloat16") for p in trained)
        if name == "rounded":
            for p in trained:
                del p.gradient_master
        view = policy.objective.view(1)
        policy.accumulate(policy.objective.prepare(make_batch(1)), view, MetricAccumulator())
        grads[name] = [masters[id(p)].grad.double() for p in trained]
        if name == "added":
            down = policy.model.model.layers[0].mlp.down_proj.weight
            assert gradient_sums([down]) is masters[id(down)].grad
    errors = {
        name: [
            float((g - e).norm() / e.norm())
            for g, e in zip(grads[name], grads["exact"], strict=True)
        ]
        for name in ("rounded", "added")
    }
    assert sum(errors["added"]) <= 1.02 * sum(errors["rounded"])
    assert max(errors["added"]) < 0.05
