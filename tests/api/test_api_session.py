"""Session: a loop of primitives computes what the recipe computes."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from api_rows import ROWS, odd
from refused import refused
from transformers import AutoModelForCausalLM

import postgrad
from postgrad.algorithms.losses import TokenLoss, ppo_clip

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_loop.py"


@pytest.fixture
def session(tiny, folder) -> postgrad.Session:
    return postgrad.Session(
        tiny, max_tokens=4, device="cpu", dtype="float32", threads=1, template="plain"
    )


def sampled(session: postgrad.Session, **options: Any) -> postgrad.Batch:
    batch = session.sample(ROWS[:4], n=4, **options)
    rewards = session.score(batch, odd)
    advantages = rewards - rewards.mean()
    batch.tokens["advantages"] = batch.expand(advantages) * batch.tokens["loss_mask"]
    return batch


@pytest.mark.slow
def test_grpo_of_primitives_gives_the_weights_of_the_recipe(tiny, folder, small):
    assert len(EXAMPLE.read_text().splitlines()) < 40
    module = runpy.run_path(str(EXAMPLE))
    arguments = {key: small[key] for key in ("device", "dtype", "threads", "template")}
    session = module["train_grpo"](
        tiny, ROWS, odd, steps=3, batch_size=4, group_size=4, lr=3e-3, max_tokens=4, **arguments
    )
    run = postgrad.train(**small, shuffle=False)
    trained = AutoModelForCausalLM.from_pretrained(run.checkpoint() / "policy").state_dict()
    for name, value in session.model.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_log_probs_are_those_of_sampling_until_an_update_changes_them(session):
    batch = sampled(session)
    before = session.logprobs(batch)
    torch.testing.assert_close(before, batch.tokens["behavior_logprobs"], atol=1e-4, rtol=0)
    session.forward_backward(batch)
    assert torch.equal(session.logprobs(batch), before)
    assert session.optim_step(lr=1e-2)["grad_norm"] > 0
    assert not torch.equal(session.logprobs(batch), before)


def test_reward_functions_of_trl_get_ids(session):
    def trl(completion_ids, **columns):
        return [float(sum(ids)) for ids in completion_ids]

    batch = session.sample(ROWS[:2], n=2)
    sums = torch.tensor([float(ids.sum()) for ids in batch.response.split()])
    assert torch.equal(session.score(batch, trl), sums)
    with refused("unsupported", "reward"):
        postgrad.score(ROWS[:2], ["1", "2"], reward=trl)


def test_a_function_as_loss_is_the_named_loss(session):
    def mine(logprobs, old_logprobs, advantages):
        return ppo_clip(logprobs, old_logprobs, advantages)

    def squared(logprobs):
        return TokenLoss(logprobs.square(), {})

    batch = sampled(session)
    named = session.forward_backward(batch, "ppo_clip", clip_low=0.2)
    given = session.forward_backward(batch, mine)
    assert named["loss"] == pytest.approx(given["loss"], abs=1e-7)
    expected = float(session.logprobs(batch).square().mean())
    assert session.forward_backward(batch, squared)["loss"] == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_lowers_the_loss_of_demonstrations(session):
    batch = session.encode(
        [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+1=", "response": "3"}]
    )
    losses = []
    for _ in range(5):
        losses.append(session.forward_backward(batch, "cross_entropy")["sft/loss"])
        session.optim_step(lr=1e-2)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_a_saved_session_goes_on_with_the_same_numbers(session, tiny, folder):
    def step(one: postgrad.Session) -> None:
        one.forward_backward(sampled(one, step=2))
        one.optim_step(lr=1e-3)

    session.forward_backward(sampled(session, step=1))
    session.optim_step(lr=1e-3)
    session.save("saved")
    step(session)
    other = postgrad.Session(
        tiny, max_tokens=4, device="cpu", dtype="float32", threads=1, template="plain"
    )
    other.load("saved")
    step(other)
    for name, value in session.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def test_a_save_that_was_stopped_leaves_nothing(session, folder, monkeypatch):
    def stop(path: str) -> None:
        (Path(path) / "optimizer.safetensors").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session.policy, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            session.save("saved")
    assert not Path("saved").exists()
    session.save("saved")
    session.load("saved")


def test_mistakes_get_one_line(session, folder):
    batch = session.sample(["1+1="], n=2)
    with pytest.raises(postgrad.RunError, match="forward_backward first"):
        session.optim_step()
    with refused("missing", "advantages"):
        session.forward_backward(batch)
    batch.tokens["advantages"] = torch.ones(batch.num_tokens)
    with refused("unknown_name", "loss"):
        session.forward_backward(batch, "ppo_clipp")
    with refused("unknown_name", "method.loss"):
        session.forward_backward(batch, "ppo_clip", tau=1.0)
    with refused("wrong_value", "prompts"):
        session.sample("1+1=")
    with pytest.raises(postgrad.ConfigError, match=r"Session.save"):
        session.load(folder)
