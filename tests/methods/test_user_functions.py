"""Losses and advantages of a user: from a file or a module, declared, checked before the run."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from method_runs import SMALL, VERIFIERS, bound, flat_weights
from refused import refused
from tiny_runs import config_of, metrics_of, metrics_without_timing, overrides_of

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.methods.support.declarations import find_advantage, find_loss
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.training.driver import train
from postgrad.training.report import Reporter

FUNCTIONS = """
import torch

from postgrad.algorithms.advantages import Advantage
from postgrad.algorithms.losses import Loss, TokenLoss, ppo_clip
from postgrad.algorithms.token_advantages import TokenAdvantages
from postgrad.methods.support.policy_objective import PolicyObjective


def clipped(logprobs, old_logprobs, advantages, *, clip_low=0.2, clip_high=0.2):
    return ppo_clip(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)


clipped_loss = Loss(
    clipped, reads=("logprobs", "old_logprobs", "advantages"), options=("clip_low", "clip_high")
)


def pull(logprobs, advantages, *, strength):
    # Raises the log-prob of every token, also where the advantage is zero.
    return TokenLoss(-advantages * logprobs - strength * logprobs, {"pull": logprobs.detach()})


pull_all = Loss(
    pull, ("logprobs", "advantages"), ("strength",), required=("strength",), needs_all_rows=True
)
pull_some = Loss(pull, ("logprobs", "advantages"), ("strength",), required=("strength",))


def to_reference(logprobs, reference_logprobs):
    return TokenLoss((logprobs - reference_logprobs) ** 2, {})


reference_loss = Loss(to_reference, ("logprobs", "reference_logprobs"))


def centered(rewards, groups, *, normalize_by_std):
    values = rewards - rewards.mean()
    return values / (values.std() + 1e-6) if normalize_by_std else values


centered_advantage = Advantage(centered, ("rewards", "groups"), options=("normalize_by_std",))


def nothing(rewards):
    return torch.zeros_like(rewards)


no_advantage = Advantage(nothing, ("rewards",))


def by_token(token_rewards, mask):
    return TokenAdvantages(token_rewards * mask, token_rewards * mask)


token_advantage = Advantage(by_token, ("token_rewards", "mask"), level="token")


def undeclared(logprobs, old_logprobs, advantages, *, scale):
    return -scale * advantages * (logprobs - old_logprobs).exp()


def short(logprobs):
    return TokenLoss(logprobs[:1], {})


short_loss = Loss(short, ("logprobs",))
half_a_result = Loss(lambda logprobs: [logprobs], ("logprobs",))
unknown_column = Loss(lambda logprobs, shade: None, ("logprobs", "shade"))
wrong_arguments = Loss(short, ("logprobs", "old_logprobs", "advantages"))
long_advantage = Advantage(lambda rewards: rewards.repeat(2), ("rewards",))
unknown_option = Advantage(lambda rewards, *, shade: rewards, ("rewards",), options=("shade",))
by_reward = Loss(lambda logprobs, reward: TokenLoss(-reward * logprobs, {}), ("logprobs", "reward"))
by_text = Loss(lambda logprobs, text: None, ("logprobs", "text"))
own_rewards = Advantage(lambda reward, index: reward * index, ("reward", "index"))


class Ratio(PolicyObjective):
    def token_losses(self, batch, current, metrics):
        ratio = (current.logprobs - batch.tokens["old_logprobs"]).exp()
        return -batch.tokens["advantages"] * ratio


class WholeLoss(PolicyObjective):
    def loss(self, batch, current, metrics):
        return (current.logprobs - batch.tokens["{column}"]).sum()
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """The folder with the user's functions.py, as current folder."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_the_example_of_the_docs_can_be_used(tiny, functions):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    block = page[page.index("    # mine.py") : page.index("Then `method.loss=mine.py")]
    (functions / "mine.py").write_text(textwrap.dedent(block))
    own = ("method.loss=mine.py:soft", "method.loss_options.tau=2")
    b = bound("grpo", tiny, *own, "method.advantage=mine.py:above_median")
    before = flat_weights(b.host.policy)
    batch = b.until("update")
    groups = batch.rows["reward"].view(-1, b.config.rollout.samples)
    expected = batch.expand((groups - groups.median(1, keepdim=True).values).flatten())
    torch.testing.assert_close(batch.tokens["advantages"], expected * batch.tokens["loss_mask"])
    assert not torch.equal(before, flat_weights(b.host.policy))


@pytest.mark.slow
def test_user_loss_from_a_file_trains_as_the_built_in_one(tiny, functions):
    runs = {}
    for name, loss in (("own", "functions.py:clipped"), ("built_in", "ppo_clip")):
        overrides = (
            f"method.loss={loss}",
            "method.clip_high=0.1",
            "training.updates_per_step=2",
            "reward.verifier=verifiers.py:graded",
        )
        config = config_of("grpo", tiny, *SMALL, *overrides, f"runs={functions}", f"name={name}")
        runs[name] = metrics_without_timing(train(config, Reporter()).folder)
    assert runs["own"] == runs["built_in"]
    assert all(line["grad_norm"] > 0 for line in runs["own"])


@pytest.mark.parametrize("path", ["functions.py:centered", "functions:centered_advantage"])
def test_user_advantage_from_a_file_or_module_is_used(path, tiny, functions):
    b = bound("grpo", tiny, f"method.advantage={path}", "method.normalize_by_std=false")
    batch = b.until("estimate")
    rewards = batch.rows["reward"]
    expected = batch.expand(rewards - rewards.mean()) * batch.tokens["loss_mask"]
    torch.testing.assert_close(batch.tokens["advantages"], expected)


def test_user_advantage_per_token_is_used_by_ppo(tiny, functions):
    b = bound("ppo", tiny, "method.advantage=functions.py:by_token")
    batch = b.until("update")
    assert torch.equal(batch.tokens["advantages"], batch.tokens["returns"])
    assert b.metrics["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "changes"), [("pull_all", True), ("pull_some", False)])
def test_loss_that_needs_all_rows_keeps_rows_without_advantage(loss, changes, tiny, functions):
    overrides = (
        f"method.loss=functions.py:{loss}",
        "method.loss_options.strength=0.5",
        "method.advantage=functions.py:nothing",
    )
    b = bound("grpo", tiny, *overrides)
    before = flat_weights(b.host.policy)
    batch = b.until("estimate")
    assert len(b.method.objective.prepare(batch)) == (len(batch) if changes else 0)
    b.until("update")
    assert torch.equal(flat_weights(b.host.policy), before) != changes


@pytest.mark.slow
def test_worker_process_finds_the_user_file(tiny, functions, real_children):
    overrides = (
        "method.loss=functions.py:pull_all",
        "method.loss_options.strength=0.5",
        "method.advantage=functions.py:centered",
        "cluster.backend=process",
        "training.steps=1",
        f"runs={functions}",
    )
    (line,) = metrics_of(train(config_of("grpo", tiny, *SMALL, *overrides), Reporter()).folder)
    assert line["grad_norm"] > 0 and "policy/pull" in line


@pytest.mark.slow
def test_a_loss_without_declaration_may_return_a_tensor(tiny, functions):
    """Its arguments name what it reads. The gradient of -A r at r = 1 is that of the built-in."""
    own = ("method.loss=functions.py:undeclared", "method.loss_options.scale=1")
    weights = []
    for overrides in ((), own):
        b = bound("grpo", tiny, *overrides)
        b.until("update")
        weights.append(flat_weights(b.host.policy))
    assert torch.equal(*weights)


REFUSED = {
    "method.loss=no_file.py:f": "method.loss=no_file.py:f",
    "method.loss=no_package.module:f": "no_package",
    "method.loss=functions.py:no_function": "no_function",
    "method.loss=functions.py:undeclared": "method.loss_options.scale",
    "method.loss=functions.py:wrong_arguments": "old_logprobs",
    "method.loss=functions.py:centered_advantage": "centered_advantage",
    "method.loss=ppo_clop": "method.loss=ppo_clop",
    "method.loss=functions.py:pull_all": "method.loss_options.strength",
    "method.loss=functions.py:clipped method.loss_options.tau=1": "clip_low, clip_high",
    "method.advantage=functions.py:no_function": "no_function",
    "method.advantage=functions.py:unknown_option": "method.shade",
    "method.advantage=functions.py:nothing method.gamma=0.9": "method.gamma=0.9",
    "method.advantage=functions.py:centered rollout.samples=1": "rollout.samples=1",
    "method=ppo method.advantage=functions.py:centered": 'level="token"',
    "method=luffy method.loss=functions.py:clipped": "method.loss=functions.py:clipped",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_mistake_in_a_user_function_is_one_line_with_exit_code_2(
    overrides, tiny, functions, capsys
):
    runs = functions / "runs"
    arguments = overrides_of(tiny, *SMALL, *overrides.split(), f"runs={runs}")
    assert main(["train", "grpo", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and REFUSED[overrides] in error
    assert not runs.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("method.loss=functions.py:short_loss", r"method\.loss"),
        ("method.loss=functions.py:half_a_result", r"return one number per token as a tensor"),
        ("method.loss=functions.py:unknown_column", r"shade"),
        ("method.loss=functions.py:reference_loss", r"reference_logprobs.*set method\.kl=loss"),
        ("method.advantage=functions.py:long_advantage", r"method\.advantage"),
    ],
)
def test_wrong_result_or_absent_column_stops_the_run_with_its_key(overrides, key, tiny, functions):
    with pytest.raises(RunError, match=key):
        bound("grpo", tiny, *overrides.split()).until("update")


@pytest.mark.slow
def test_token_losses_read_old_logprobs_also_with_one_update(tiny, functions):
    """The gradient of -A r at r = 1 is that of the built-in loss, and kl/engine is logged too."""
    results = []
    for objective in ("", "functions.py:Ratio"):
        b = bound("grpo", tiny, f"method.objective={objective}")
        b.until("update")
        results.append((flat_weights(b.host.policy), b.metrics["kl/engine"], b.metrics["loss"]))
    (weights, *numbers), (own_weights, *own_numbers) = results
    assert torch.equal(weights, own_weights) and numbers == own_numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "hint"),
    [("old_logprobs", "override token_losses"), ("reward", r"batch\.expand"), ("shade", "known")],
)
def test_absent_column_in_a_whole_loss_is_one_line(column, hint, tiny, functions):
    (functions / "functions.py").write_text(FUNCTIONS.replace("{column}", column))
    with pytest.raises(RunError, match=rf"WholeLoss\.loss: no token column '{column}'.*{hint}"):
        bound("grpo", tiny, "method.objective=functions.py:WholeLoss").until("update")


def test_loss_and_advantage_read_row_columns(tiny, functions):
    b = bound(
        "grpo",
        tiny,
        "method.loss=functions.py:by_reward",
        "method.advantage=functions.py:own_rewards",
    )
    batch = b.until("estimate")
    reward = batch.rows["reward"]
    expected = batch.expand(reward * batch.rows["index"]) * batch.tokens["loss_mask"]
    torch.testing.assert_close(batch.tokens["advantages"], expected)
    logprobs = torch.full((batch.num_tokens,), -2.0)
    current = TokenOutputs(logprobs, logprobs, logprobs)
    values = b.method.objective.token_losses(batch, current, MetricAccumulator())
    torch.testing.assert_close(values, 2.0 * batch.expand(reward))


def test_loss_that_reads_texts_is_one_line(tiny, functions):
    b = bound("grpo", tiny, "method.loss=functions.py:by_text")
    with pytest.raises(RunError, match="row column text"):
        b.until("update")


def test_changed_file_is_loaded_again(functions):
    assert find_loss("functions.py:pull").needs_all_rows
    file = functions / "functions.py"
    file.write_text(FUNCTIONS.replace("needs_all_rows=True", "needs_all_rows=False"))
    assert not find_loss("functions.py:pull").needs_all_rows


def test_name_or_function_selects_the_same_declaration(functions):
    assert find_loss("functions.py:clipped") is find_loss("functions.py:clipped_loss")
    assert find_advantage("functions.py:centered").options == ("normalize_by_std",)
    with refused("unknown_name", "method.advantage"):
        find_advantage("functions.py:clipped")


class UserLoss(PolicyObjective):
    def loss(self, batch, current, metrics):
        return super().loss(batch, current, metrics)


class UserTokenLosses(PolicyObjective):
    def token_losses(self, batch, current, metrics):
        return super().token_losses(batch, current, metrics)


class UserLossOfSomeRows(UserLoss):
    def needs_all_rows(self):
        return False


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [
        (UserLoss, True),
        (UserTokenLosses, True),
        (UserLossOfSomeRows, False),
        (PolicyObjective, False),
    ],
)
def test_the_loss_of_a_user_class_gets_rows_without_advantage(kind, keeps, tiny, functions):
    b = bound("grpo", tiny, "method.advantage=functions.py:nothing")
    batch = b.until("estimate")
    assert len(kind(b.method.config).prepare(batch)) == (len(batch) if keeps else 0)
