"""Captured passes against the same passes launched kernel by kernel, on a GPU."""

import pytest
import torch
from llama import make_llama

from postgrad.config.compose import compose
from postgrad.config.schema import ModelConfig
from postgrad.methods import find_method
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "llama")


def make_policy(folder, recipe, dtype, *overrides):
    from postgrad.model.load.load import load
    from postgrad.model.policy import LocalPolicy

    fixed = [
        f"model.path={folder}",
        "data.train=arithmetic:1",
        "model.device=cuda",
        f"model.dtype={dtype}",
    ]
    config = compose(
        recipe,
        [*fixed, "training.token_budget=1500", *overrides],
        lambda name: find_method(name).Settings,
    )
    loaded = load(ModelConfig(path=str(folder), dtype=dtype), torch.device("cuda"), 0)
    return LocalPolicy(config, loaded, find_method(recipe)(config).objective)


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        Trajectory(str(i), torch.randint(20, 2000, (3 + 17 * i,), generator=generator).tolist(),
                   torch.randint(20, 2000, (5 + 29 * j,), generator=generator).tolist(), group=i)
        for i in range(8)
        for j in range(5)
    ]  # fmt: skip
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.randn(batch.num_tokens, generator=generator)
    return batch


BUPO = ("bupo", "method.num_blocks=2", "method.phase_one_steps=2")


@pytest.mark.parametrize(
    "recipe", [("grpo", "method.entropy_coef=0.01"), BUPO], ids=["grpo", "bupo"]
)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_captured_passes_give_the_gradients_of_eager_passes(folder, recipe, dtype, bound):
    """Three updates of several sizes: buffers are cleared, BuPO's view and parameters change."""
    captured, eager = (make_policy(folder, recipe[0], dtype, *recipe[1:]) for _ in range(2))
    assert captured.graph_cache.enabled
    eager.graph_cache.enabled = False
    for step in (1, 2, 3):
        grads = []
        for policy in (captured, eager):
            view = policy.objective.view(step)
            policy._freeze_unused(view)
            from postgrad.model.metrics import MetricAccumulator

            policy.accumulate(policy.objective.prepare(make_batch(step)), view, MetricAccumulator())
            masters = policy.optimizer.masters
            grads.append(
                {name: None if m.grad is None else m.grad.clone() for name, m in masters.items()}
            )
            policy.optimizer.adam.zero_grad(set_to_none=True)
        for name, ours in grads[0].items():
            theirs = grads[1][name]
            assert (ours is None) == (theirs is None), name
            if theirs is not None:
                assert (ours - theirs).norm() <= bound * theirs.norm(), name
    assert len(captured.graph_cache.captured) > 1


def test_captured_log_probs_equal_eager_ones_bit_for_bit(folder):
    captured, eager = (make_policy(folder, "grpo", "bfloat16") for _ in range(2))
    eager.graph_cache.enabled = False
    for seed in (1, 2, 1):
        batch = make_batch(seed)
        ours, theirs = captured.logprobs(batch), eager.logprobs(batch)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


def test_captured_and_eager_updates_have_equal_losses(folder):
    captured, eager = (
        make_policy(folder, "grpo", "float32", "optimizer.lr=1e-3") for _ in range(2)
    )
    eager.graph_cache.enabled = False
    for step in range(1, 6):
        ours, theirs = (policy.update(make_batch(step), step) for policy in (captured, eager))
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_backward_after_the_next_forward_is_refused(folder):
    from postgrad.errors import RunError
    from postgrad.model.port import FULL

    policy, batch = make_policy(folder, "grpo", "float32"), make_batch(1)
    micro = policy.micro_batches(batch)[0].to(policy.device)
    targets = batch.select(micro.rows).response.values.to(policy.device)
    first = policy.forward(micro, targets, FULL)
    policy.forward(micro, targets, FULL)
    with pytest.raises(RunError, match="backward"):
        first.logprobs.sum().backward()
