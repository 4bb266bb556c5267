"""Runs with tool calls: the policy learns to call; tokens that a tool wrote are in no loss."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from refused import refused
from tiny_runs import config_of, metrics_of, stock_model, stock_row
from tool_model import CALL, SHORT_CHAT, TOOLS, chat_model

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import POLICY, TOOL


@pytest.fixture
def mine(tmp_path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(TOOLS)
    return file


CALLED = '''
def score(response, problem):
    """Highest for the call and nothing else; shorter is better, so that turns end."""
    if "51" in response and CALL in response:
        raise RuntimeError("a verifier saw what the tool wrote")
    called, more = response.startswith(CALL), response.count(CALL) - 1
    waste = 0.02 * len(response.replace(CALL, "")) + 0.1 * max(0, more)
    score = 1.0 if response == CALL else 0.5 * called - min(1.0, waste)
    return {"score": score, "called": float(called)}
'''


@pytest.fixture
def overrides(mine, tmp_path) -> list[str]:
    (tmp_path / "reward.py").write_text(f"CALL = {CALL!r}\n{CALLED}")
    return [
        f"rollout.tools=[{mine}:look]",
        f"reward.verifier={tmp_path / 'reward.py'}:score",
        "data.template=chat",
        "data.train=arithmetic:1:digits",
        f"runs={tmp_path / 'runs'}",
        "rollout.max_response_tokens=60",
        "data.max_prompt_tokens=512",
    ]


@pytest.mark.nightly
def test_a_policy_learns_to_call_its_tool(overrides, tmp_path):
    """The policy learns to call the tool, end the turn and stop after the answer."""
    model = chat_model(tmp_path / "model", SHORT_CHAT)
    more = (
        "training.steps=30",
        "training.problems_per_step=8",
        "rollout.samples=32",
        "optimizer.lr=1e-2",
        "rollout.max_turns=2",
    )
    folder = train(
        config_of("grpo", model, *overrides, *more, "rollout.max_response_tokens=40"), Reporter()
    ).folder
    lines = metrics_of(folder)
    best = max(lines, key=lambda line: line["reward/mean"])
    assert lines[0]["reward/called"] < 0.2 and lines[0]["reward/mean"] < 0
    assert (
        best["reward/called"] > 0.8
        and best["reward/mean"] > 0.7
        and best["tools/calls"] > 0.8
        and best["tools/turns"] > 1.7
    )
    gaps = [
        line["engine/gap_max"] for line in lines if "engine/gap_max" in line
    ]  # a step without a signal prices nothing
    assert len(gaps) > 20 and max(gaps) < 1e-4, (
        "the trainer prices what follows an answer as the engine did"
    )
    files = sorted((folder / "rollouts").glob("*.parquet"))
    assert any(
        TOOL in sources
        for file in files
        for sources in pq.read_table(file)["token_source"].to_pylist()
    )
    assert (
        main(
            [
                "eval",
                str(folder),
                "data=arithmetic:1:digits:test",
                "data.limit=4",
                f"out={tmp_path / 'eval'}",
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "eval" / "settings.json").read_text())["rollout"]["tools"], (
        "the run's tools are its evaluation's"
    )


def test_no_loss_sees_what_a_tool_wrote(with_tools):
    """The gradient is the stock model's over the policy's tokens, with tool output as context."""
    bound = with_tools("grpo", "rollout.samples=8")
    batch = bound.until("estimate")
    tool = batch.tokens["token_source"] == TOOL
    assert bool(tool.any()) and not bool(batch.tokens["loss_mask"][tool].any())
    assert bool(batch.tokens["loss_mask"][batch.tokens["token_source"] == POLICY].all())
    assert not bool(batch.tokens["advantages"][tool].any()) and bool(
        batch.tokens["advantages"].any()
    )
    answered = len(set(batch.response.row_index[tool].tolist()))
    assert 0 < answered < len(batch) and bound.metrics["tools/calls"] == answered / len(batch)
    other = batch.tokens["behavior_logprobs"][tool]
    assert torch.equal(other, torch.zeros_like(other))
    stock = stock_model(bound.config.model.path)
    rows = zip(batch.prompt.split(), batch.response.split(), strict=True)
    priced = torch.cat([stock_row(stock, p.tolist(), r.tolist())[0] for p, r in rows])
    ours = bound.method.ports.policy.logprobs(batch)["logprobs"]
    own = batch.tokens["loss_mask"]
    assert torch.allclose(ours[own].double(), priced[own].detach(), atol=1e-4)


def test_tools_need_a_chat_template(tiny, tmp_path):
    with refused("unsupported", "rollout.tools"):
        train(config_of("grpo", tiny, "rollout.tools=[calculator]", f"runs={tmp_path}"), Reporter())
    assert list(tmp_path.iterdir()) == []
