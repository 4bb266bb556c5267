"""LUFFY and ExGRPO with tools: what a tool wrote is context, and in no loss."""

import math
from dataclasses import replace

import pytest
import torch

from postgrad.methods.method import Step
from postgrad.methods.support.replay_pool import Experience, ReplayPool
from postgrad.types import DEMONSTRATION, POLICY, REPLAY, TOOL, Batch, Trajectory


def test_luffy_trains_on_demonstrations_and_on_the_policys_own_turns(with_tools):
    world = with_tools("luffy")
    batch = world.until("update")
    source = batch.tokens["token_source"]
    is_given = batch.expand(batch.rows["source"]) == DEMONSTRATION
    assert int((batch.rows["source"] == DEMONSTRATION).sum()) == 2
    assert bool((source[is_given] == DEMONSTRATION).all()), "demonstrations are single turns"
    tool = source == TOOL
    assert bool(tool.any()) and bool((source == POLICY).any())
    assert torch.equal(batch.tokens["loss_mask"], ~tool)
    assert not bool(batch.tokens["advantages"][tool].any())
    assert world.metrics["off_policy/tokens"] == float(is_given.sum())
    has_signal = batch.sum_tokens(batch.tokens["advantages"].abs()) > 0
    own = (source == POLICY) & batch.expand(has_signal)
    assert world.metrics["on_policy/tokens"] == float(own.sum())
    assert all(
        text == ""
        for text, one in zip(batch.rows["messages"], batch.rows["source"].tolist(), strict=True)
        if one == DEMONSTRATION
    )


def test_the_tokens_of_a_tool_keep_the_whole_vocabulary(with_tools, monkeypatch):
    """With top-k, the turns of the policy have kept ids and the answers between them have none."""
    world = with_tools("grpo", "rollout.top_k=2")
    engine = world.method.ports.engine
    plain = engine.generate

    def generate(requests, sampling):
        assert sampling.record_kept
        groups = plain(requests, sampling)
        return [
            [replace(one, kept_ids=[[token, 0] for token in one.tokens]) for one in group]
            for group in groups
        ]

    monkeypatch.setattr(engine, "generate", generate)
    batch = world.until("sample")
    source = batch.tokens["token_source"]
    assert bool((source == TOOL).any())
    assert torch.equal(batch.tokens["num_kept"], torch.where(source == TOOL, 0, 2))
    for row, ids in enumerate(batch.rows["kept_ids"]):
        tokens = batch.response.values[(batch.row_index == row) & (source == POLICY)]
        assert ids.tolist()[::2] == tokens.tolist()


def test_an_experience_counts_the_policys_tokens_only():
    """exp((1 + 3) / 2) and the mean of 0.2 and 0.6; the tool's token has -9 and 5."""
    row = Trajectory(
        "u", [1], [2, 3, 4], token_source=[POLICY, TOOL, POLICY], loss_mask=[True, False, True]
    )
    outputs = {"logprobs": torch.tensor([-1.0, -9.0, -3.0]), "entropy": torch.tensor([0.2, 5, 0.6])}
    pool = ReplayPool()
    pool.add_rows(Batch.of([row]), torch.tensor([2]), outputs)
    copy = ReplayPool()
    copy.load(pool.state())
    for one in (pool, copy):
        (stored,) = one.entries["u"].experiences
        assert stored.own.tolist() == [True, False, True]
        assert stored.perplexity == pytest.approx(math.exp(2.0))
        assert stored.entropy == pytest.approx(0.4)


def test_a_replay_keeps_the_tools_answer_as_context(with_tools):
    world = with_tools("exgrpo")
    method = world.method
    problem = world.problems[0]
    own = torch.tensor([True, False, True])
    stored = Experience(torch.tensor([4, 6, 5]), torch.tensor([-1.0, -9.0, -3.0]), own, 0.5)
    method.pool.add(problem.uid, 1, stored)
    row = method.replay_row(problem, Step(1, world.problem_queue))
    assert list(row.token_source or []) == [REPLAY, TOOL, REPLAY]
    assert row.loss_mask == [True, False, True]
    method.is_mixed = True
    world.problem_queue.retire([])
    batch = world.until("update")
    source = batch.tokens["token_source"]
    assert bool((source == REPLAY).any()) and bool((source == TOOL).any())
    assert torch.equal(batch.tokens["loss_mask"], source != TOOL)
    assert not bool(batch.tokens["advantages"][source == TOOL].any())
