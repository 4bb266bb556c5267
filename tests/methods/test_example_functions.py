"""Advantages and losses of examples/, given by path: their numbers, and a run with each."""

import pytest
import torch
from method_runs import SMALL, VERIFIERS
from tiny_runs import EXAMPLES, GUESS, metrics_of, overrides_of
from torch import Tensor
from torch.testing import assert_close

from postgrad.cli.main import main
from postgrad.methods.support.declarations import find_advantage, find_loss

# Two rows of a group with turns of 2+1 and 1+1+1 tokens; an observation lies between turns.
TURNS = torch.tensor([0, 0, -1, 1, 0, -1, 1, -1, 2])
COLUMNS = {
    "turns": TURNS,
    "mask": TURNS >= 0,
    "rows": torch.tensor([0] * 4 + [1] * 5),
    "groups": torch.tensor([5, 5]),
}
REWARDS = [[0.0, 1.0, 0.0], [-1.0, 0.0, 2.0]]  # G = [0.5, 1, 0] and [-0.5, 1, 2] at gamma 0.5


def path_of(name: str, function: str) -> str:
    return f"{EXAMPLES / name}:{function}"


def turn_advantages(name: str, rewards: list[list[float]], **more) -> tuple[list, list]:
    advantage = find_advantage(path_of("turn_advantages.py", name))
    result = advantage.function(turn_rewards=torch.tensor(rewards), **COLUMNS, gamma=0.5, **more)
    return result.advantages.tolist(), result.returns.tolist()


def test_turns_are_compared_with_the_same_turn_of_the_group():
    """Two numbers x, y have the offset (x - y) / 2 each way, and the std |x - y| / sqrt(2)."""
    advantages, returns = turn_advantages("turn_grpo", REWARDS, normalize_by_std=False)
    assert advantages == [0.5, 0.5, 0, 0, -0.5, 0, 0, 0, 1]
    assert returns == [0.5, 0.5, 0, 1, -0.5, 0, 1, 0, 2]
    advantages, _ = turn_advantages("turn_grpo", REWARDS)
    assert advantages == pytest.approx(
        [0.707106, 0.707106, 0, 0, -0.707106, 0, 0, 0, 0.707106], abs=2e-6
    )


def test_turns_are_compared_with_turns_that_began_in_the_same_state():
    """Both rows begin in state 0; turn 1 of the first and turn 2 of the second in state 1."""
    states = torch.tensor([[0, 1, -1], [0, 2, 1]])
    advantages, _ = turn_advantages("gigpo", REWARDS, turn_states=states, normalize_by_std=False)
    # The totals are equal. State 0: G = 0.5 and -0.5; state 1: G = 1 and 2; state 2 occurs once.
    assert advantages == [0.5, 0.5, 0, -0.5, -0.5, 0, 0, 0, 0.5]
    rewards = [[0.0, 3.0, 0.0], [-1.0, 0.0, 2.0]]  # totals 3 and 1; state 1: G = 3 and 2
    advantages, _ = turn_advantages("gigpo", rewards, turn_states=states, normalize_by_std=False)
    # State 0: G = 1.5 and -0.5
    assert advantages == [2, 2, 0, 1.5, -2, 0, -1, 0, -1.5]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_vespo():
    """w is 1.1 · 1.5 · 0.7 = 1.155 where A = 1, and 0.5 · 4 = 2 where A = -1.

    phi = 1.155^2 · e^(3 · -0.155) = 0.837948, and 2^3 · e^(2 · -1) = 1.082682.
    """
    loss = find_loss(path_of("vespo.py", "vespo"))
    old = column(0.5, 0.2, 0.4, 0.5, 0.2).log()
    new = (old + column(1.1, 1.5, 0.7, 0.5, 4).log()).requires_grad_()
    advantages, rows = column(1, 1, 1, -1, -1), torch.tensor([0, 0, 0, 1, 1])
    mask = torch.ones(5, dtype=torch.bool)
    result = loss.function(new, old, advantages, mask, rows, 2)
    phi = column(*[0.837948] * 3, *[1.082682] * 2)
    assert_close(result.metrics["phi"], phi, atol=1e-6, rtol=0)
    mean = result.values.mean()
    assert_close(mean, torch.tensor(0.166798, dtype=torch.float64), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(mean, new)
    assert_close(gradient, -phi * advantages / 5, atol=1e-6, rtol=0)
    # Without the last token, w = 0.5 in the second row: 0.125 · e.
    mask[4] = False
    result = loss.function(new, old, advantages, mask, rows, 2)
    assert float(result.metrics["phi"][3]) == pytest.approx(0.339785, abs=1e-6)


TURN_RUN = (GUESS, "environment.workers=0", "rollout.max_turns=3", "data.train=seeds:4")
RUNS = {
    "turn_grpo": ("method.advantage", "turn_advantages.py", *TURN_RUN),
    "gigpo": ("method.advantage", "turn_advantages.py", *TURN_RUN, "method.gamma=0.9"),
    "vespo": ("method.loss", "vespo.py", "training.updates_per_step=2", "REWARD"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_with_it(name, tiny, tmp_path):
    key, file, *settings = RUNS[name]
    (tmp_path / "rewards.py").write_text(VERIFIERS)
    reward = f"reward.verifier={tmp_path}/rewards.py:graded"
    settings = [one.replace("REWARD", reward) for one in settings]
    chosen = f"{key}={path_of(file, name)}"
    overrides = overrides_of(tiny, *SMALL, "training.steps=1", chosen, *settings)
    if GUESS in settings:
        overrides.append("rollout.max_response_tokens=40")
    assert main(["train", "grpo", *overrides, f"runs={tmp_path}"]) == 0
    (metrics,) = metrics_of(tmp_path / "test")
    assert metrics["grad_norm"] > 0
    assert name != "vespo" or metrics["policy/phi"] > 0
