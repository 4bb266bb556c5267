"""Agents that send pictures: what they sampled with is what the trainer computes with."""

import sys
from pathlib import Path

import pytest
import torch
from parallel import local_policy
from tool_model import chat_model
from vision_models import load_vision_model, square

from postgrad.agents.runner import Agents
from postgrad.config.schema import AgentConfig, ModelConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.methods.support.responses import sampled_row
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import FULL
from postgrad.problem import Problem
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.turns import run_turns
from postgrad.types import Batch

PROGRAM = Path(__file__).parent / "program.py"
CONTENT = [{"type": "image"}, {"type": "text", "text": "1+2="}]
RED, BLUE, GREEN = square("red"), square("blue", 48, 16), square("green")
PROBLEM = Problem(
    "p",
    ({"role": "user", "content": CONTENT},),
    "",
    images=(RED,),
    extra={"urls": [BLUE.data_url(), GREEN.data_url()]},
)


def play(loaded, name: str, problem: Problem = PROBLEM, seeds: int = 6):
    encoder = Encoder(loaded.tokenizer, "auto", 4096)
    command = f"{sys.executable} -I -S {PROGRAM} {name}"
    agents = Agents(AgentConfig(command), encoder, "auto")
    images = problem.prompt_images
    request = Request(encoder.prompt(problem), list(range(seeds)), images=images)
    engine = NativeEngine(loaded, RolloutConfig())
    try:
        (done,) = run_turns(engine, [request], [problem], Sampling(1.0, 400), agents)
    finally:
        agents.close()
    return done


def gradients(policy, batch: Batch) -> torch.Tensor:
    policy.accumulate(policy.objective.prepare(batch), FULL, MetricAccumulator())
    found = [m.grad.flatten() for m in policy.optimizer.masters.values() if m.grad is not None]
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return torch.cat(found)


def test_rows_of_agents_have_the_pictures_that_were_sent(tmp_path):
    loaded = load_vision_model(tmp_path, "qwen3_vl")
    done = play(loaded, "look_twice")
    assert not any(one.episode.failure for one in done), done[0].episode.failure
    whole = [one for one in done if one.turns == 3]
    exchanged = [one for one in done if one.images == (GREEN, BLUE)]
    assert len(whole) >= 2 and all(one.images == (RED, BLUE) for one in whole)
    assert len(exchanged) == 6 and all(one.turns == 1 for one in exchanged)
    assert {"type": "image"} in whole[0].messages[1]["content"]
    assert whole[0].episode.question == "<image>1+2="

    batch = Batch.of([sampled_row(PROBLEM, [], [], one) for one in done])
    batch.tokens["advantages"] = torch.ones(batch.num_tokens)
    policy = local_policy(tmp_path, ["model.vision=trained"])
    gaps = batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]
    assert float(gaps[batch.tokens["loss_mask"]].abs().max()) < 1e-4
    right = gradients(policy, batch)
    torch.testing.assert_close(right, gradients(policy, batch))
    batch.rows["images"] = [
        (square("blue", count=2), *images[1:]) for images in batch.rows["images"]
    ]
    gaps = batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]
    assert float(gaps[batch.tokens["loss_mask"]].abs().max()) > 1e-3
    assert float((gradients(policy, batch) - right).abs().max()) > 1e-3


@pytest.mark.parametrize(("has_chat", "reason"), [(0, "reads no pict"), (1, "model of text only")])
def test_a_model_of_text_is_shown_no_picture(has_chat, reason, tiny, tmp_path):
    folder = chat_model(tmp_path / "chat") if has_chat else tiny
    config = ModelConfig(path=str(folder), device="cpu", dtype="float32")
    loaded = load(config, torch.device("cpu"))
    text = Problem("p", ({"role": "user", "content": "1"},), "", extra=PROBLEM.extra)
    (one,) = play(loaded, "look_twice", text, 1)
    assert reason in str(one.episode.failure), one.episode.failure
