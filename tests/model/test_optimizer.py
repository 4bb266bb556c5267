"""AdamW with clipping, float32 masters and schedules, against torch and hand-computed numbers."""

import dataclasses
import math

import pytest
import torch
from tiny_runs import config_of, random_batch
from torch import nn

from postgrad.cluster.host import build_host
from postgrad.config.schema import OptimizerConfig
from postgrad.errors import RunError
from postgrad.model.optimizers.optimizer import Optimizer, learning_rate


def small_net(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def data(seed: int) -> torch.Tensor:
    scale = 3 if seed % 2 else 0.1
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) * scale


(KIND,) = (field for field in dataclasses.fields(OptimizerConfig) if field.name == "kind")
# adamw_8bit rounds its state; tests/model/test_adamw_8bit.py.
KINDS = [k for k in KIND.metadata["choices"] if k.startswith("adamw") and k != "adamw_8bit"]


def test_rmsprop_steps_equal_those_of_torch():
    config = OptimizerConfig(kind="rmsprop", lr=1e-3, eps=1e-8, max_grad_norm=0.0)
    ours, theirs = small_net(), small_net()
    optimizer = Optimizer(ours, config)
    reference = torch.optim.RMSprop(theirs.parameters(), lr=1e-3, eps=1e-8)
    for step in range(1, 5):
        ours(data(step)).square().sum().backward()
        theirs(data(step)).square().sum().backward()
        optimizer.step(1e-3)
        reference.step()
        reference.zero_grad()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_steps_equal_torch_adamw_with_clipping(max_grad_norm, kind):
    config = OptimizerConfig(
        kind=kind,
        lr=1e-2,
        betas=[0.8, 0.95],
        eps=1e-6,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
    )
    ours, theirs = small_net(), small_net()
    optimizer = Optimizer(ours, config)
    adam = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
    )
    for step in range(1, 7):
        for part in (data(step), data(step + 10)):  # two backward passes accumulate
            ours(part).square().sum().backward()
            theirs(part).square().sum().backward()
        norm = optimizer.step(1e-2 / step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or math.inf)
        for group in adam.param_groups:
            group["lr"] = 1e-2 / step
        adam.step()
        adam.zero_grad()
        assert norm == pytest.approx(float(expected), rel=1e-6)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
            assert p.grad is None


def test_parameters_may_have_their_own_learning_rate_scale():
    net = small_net()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = Optimizer(
        net,
        OptimizerConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=0.0),
        {"0.weight": 0.0, "2.weight": 10.0},
    )
    net(data(1)).sum().backward()
    optimizer.step(1e-2)
    changes = [(p - q).abs().max().item() for p, q in zip(net.parameters(), before, strict=True)]
    assert changes[0] == 0.0
    assert changes[1] == pytest.approx(1e-2, rel=1e-3)
    assert changes[2] == pytest.approx(1e-1, rel=1e-3)


def test_bfloat16_weights_follow_float32_masters():
    """Steps far below bfloat16's spacing add up in the master and then change the weights."""
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = Optimizer(
        net,
        OptimizerConfig(lr=1e-4, betas=[0.0, 0.0], eps=1e-8, weight_decay=0.0, max_grad_norm=0.0),
    )
    master = optimizer.masters["weight"]
    for _ in range(100):
        net(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-4)  # without momentum every step is lr * sign of the gradient
    assert master.item() == pytest.approx(1.0 - 100 * 1e-4, abs=1e-5)
    assert net.weight.item() == torch.tensor(master.item()).to(torch.bfloat16).item() == 0.98828125


def test_bfloat16_gradients_accumulate_in_float32():
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(net, OptimizerConfig())
    for size in [256.0] + [0.5] * 64:  # in bfloat16 256 + 0.5 is 256
        net(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    assert optimizer.masters["weight"].grad.item() == 256.0 + 32.0 and net.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(bad):
    net = small_net()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = Optimizer(net, OptimizerConfig(lr=0.1))
    (net(data(1)).sum() * bad).backward()
    with pytest.raises(RunError, match=r"gradient norm is (nan|inf)"):
        optimizer.step(0.1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "rates"),
    [
        ("constant", 0, 0.0, [1.0] * 10),
        ("constant", 4, 0.0, [0.2, 0.4, 0.6, 0.8] + [1.0] * 6),
        ("linear", 4, 0.0, [0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 0, 0.5, [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]),
        ("cosine", 4, 0.0, [0.2, 0.4, 0.6, 0.8, 1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        ("cosine", 4, 0.1, [0.2, 0.4, 0.6, 0.8, 1.0, 0.93971143, 0.775, 0.55, 0.325, 0.16028857]),
    ],
)
def test_learning_rate_schedules_equal_hand_computed_rates(schedule, warmup, final, rates):
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final)
    assert [learning_rate(config, step, 10) for step in range(1, 11)] == pytest.approx(
        [2.0 * rate for rate in rates], abs=1e-7
    )


def test_the_update_uses_the_schedule(tiny):
    policy = build_host(
        config_of(
            "grpo", tiny, "optimizer.lr=1e-3", "optimizer.warmup_steps=4", "training.steps=10"
        )
    ).policy
    assert policy.update(random_batch(1), 2)["lr"] == pytest.approx(4e-4)


def test_updates_per_step_splits_by_group_and_takes_one_optimizer_step_each(tiny):
    from postgrad.model.policy import split_updates

    batch = random_batch(2, groups=5, samples=3)
    parts = split_updates(batch, 3)
    assert [sorted(set(part.rows["group"].tolist())) for part in parts] == [[0, 1], [2, 3], [4]]
    assert sum(len(part) for part in parts) == len(batch)
    policy = build_host(
        config_of("grpo", tiny, "training.updates_per_step=3", "optimizer.lr=1e-3")
    ).policy
    policy.update(batch, 1)
    assert {int(state["step"]) for state in policy.optimizer.adam.state.values()} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_policy_continues_bit_for_bit(tiny, tmp_path, dtype, kind):
    config = config_of(
        "grpo",
        tiny,
        f"model.dtype={dtype}",
        f"optimizer.kind={kind}",
        "optimizer.lr=1e-2",
        "optimizer.schedule=cosine",
    )
    one = build_host(config).policy
    for step in (1, 2):
        one.update(random_batch(step), step)
    one.save(str(tmp_path))
    two = build_host(config).policy
    two.load(str(tmp_path))
    for step in (3, 4):
        assert (
            one.update(random_batch(step), step)["grad_norm"]
            == two.update(random_batch(step), step)["grad_norm"]
        )
    assert all(torch.equal(w, two.weights()[name]) for name, w in one.weights().items())
    for name in one.optimizer.masters:
        assert torch.equal(one.optimizer.masters[name], two.optimizer.masters[name])
        for key, value in one.optimizer.adam.state[one.optimizer.masters[name]].items():
            assert torch.equal(value, two.optimizer.adam.state[two.optimizer.masters[name]][key])
