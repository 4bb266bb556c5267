"""Agents with the official OpenAI client and with an agent framework; a policy that learns."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from fake_engine import FakeEngine
from refused import refused
from test_agents import LETTERS, CountingEngine, command
from tiny_runs import GUESS, config_of, metrics_of, stock_model
from tool_model import CALL, KNOWS_TOOLS, PLAIN_CHAT, chat_tokenizer

from postgrad.agents.runner import Agents
from postgrad.cluster.host import build_host
from postgrad.config.schema import AgentConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.methods import find_method
from postgrad.problem import Problem
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.turns import run_turns
from postgrad.training.driver import train
from postgrad.training.report import Reporter

FOLDER = Path(__file__).parent


def run_program(agents, engine, prompts, problem, limit, seeds=(7,)):
    requests = [Request(prompts.prompt(problem), list(seeds))]
    try:
        sampling = Sampling(max_new_tokens=limit)
        (done,) = run_turns(engine, requests, [problem], sampling, agents)
    finally:
        agents.close()
    return done


@pytest.mark.slow
def test_the_official_client_gets_the_tokens_that_are_recorded(tiny, prompts):
    """Tokens and log-probs of both turns are those of the stock model for the whole text."""
    pytest.importorskip("openai", reason="needs openai")
    engine = build_host(config_of("grpo", tiny)).engine
    problem = Problem("p1", ({"role": "user", "content": "1+2="},), "3")
    agents = Agents(AgentConfig(f"{sys.executable} {FOLDER / 'openai_agent.py'}"), prompts, "auto")
    done = run_program(agents, engine, prompts, problem, 24, seeds=(3, 4, 5))
    assert len(done) == 3, "every second call continues the first"
    model = stock_model(tiny)
    for one in done:
        assert one.episode.failure is None, one.episode.failure
        ids = [*one.episode.prompt, *one.tokens]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(one.episode.prompt)
        exact = [float(logprobs[start + i - 1, token]) for i, token in enumerate(one.tokens)]
        for mine, theirs, is_policy in zip(one.logprobs, exact, one.policy_mask, strict=True):
            assert mine == pytest.approx(theirs if is_policy else 0.0, abs=1e-4)
        first_turn = sum(one.logprobs[: one.episode.turn_ends[0]])
        assert one.episode.parts["first_logprobs"] == pytest.approx(first_turn, abs=1e-4)
        own = one.tokens[: one.episode.turn_ends[0]]
        between = one.policy_mask.count(False)
        assert one.turns == 2 and prompts.decode(one.tokens[len(own) :][:between]) == "+1="


@pytest.mark.nightly
def test_the_responses_api_is_recorded_as_one_trajectory():
    """A tool call, its output and a streamed turn; log-probs reach the program, too."""
    pytest.importorskip("openai", reason="needs openai")
    prompts = Encoder(chat_tokenizer(LETTERS, KNOWS_TOOLS), "chat", 2000)
    said = [prompts.encode_response(text) for text in (CALL, "42")]
    replies = iter(said)
    engine = CountingEngine(lambda prompt, seed: next(replies))
    program = FOLDER / "responses_agent.py"
    agents = Agents(AgentConfig(f"{sys.executable} {program}"), prompts, "auto")
    problem = Problem("p1", ({"role": "user", "content": "What?"},), "42")
    (done,) = run_program(agents, engine, prompts, problem, 2000)
    assert done.episode.failure is None, done.episode.failure
    assert done.turns == 2 and done.policy_tokens == [*said[0], *said[1]]
    between = done.tokens[len(said[0]) : -len(said[1])]
    assert prompts.decode(between).count("<tool_response>\n42\n</tool_response>") == 1
    policy = zip(done.logprobs, done.policy_mask, strict=True)
    numbers = [-float(i) for turn in said for i in range(len(turn))]
    assert [logprob for logprob, is_policy in policy if is_policy] == numbers
    assert done.episode.reward == 1.0
    assert done.episode.parts["first_logprobs"] == sum(numbers[: len(said[0])])


@pytest.mark.nightly
def test_an_agent_framework_is_recorded():
    """smolagents rewrites replies in later prompts, so each step is a trajectory of its own."""
    pytest.importorskip("smolagents", reason="needs smolagents")
    prompts = Encoder(chat_tokenizer(LETTERS, PLAIN_CHAT), "chat", 40_000)
    replies = iter(
        [
            "Thought: add.\n<code>\nx = 40 + 2\nprint(x)\n</code>",
            "Thought: done.\n<code>\nfinal_answer(x)\n</code>",
        ]
    )
    engine = FakeEngine(lambda prompt, seed: prompts.encode_response(next(replies)))
    problem = Problem("p1", ({"role": "user", "content": "40 + 2?"},), "42")
    agents = Agents(AgentConfig(f"{sys.executable} {FOLDER / 'smol_agent.py'}"), prompts, "auto")
    done = run_program(agents, engine, prompts, problem, 4000)
    assert [one.episode.failure for one in done] == [None, None]
    assert [one.episode.reward for one in done] == [1.0, 1.0]
    assert "final_answer(x)" in prompts.decode(done[0].policy_tokens)
    assert "x = 40 + 2" in prompts.decode(done[1].policy_tokens)
    assert "42" in prompts.decode(done[0].episode.prompt)


def agent_settings(tmp_path, *changes: str) -> list[str]:
    return [
        f"agent={command('sevens')}",
        "data.train=arithmetic:1:digits",
        f"runs={tmp_path / 'runs'}",
        "rollout.max_response_tokens=4",
        "data.max_prompt_tokens=64",  # both together fit the context of 512
        *changes,
    ]


@pytest.mark.slow
def test_a_policy_learns_from_the_reward_of_a_program(tmp_path, tiny):
    config = config_of(
        "grpo",
        tiny,
        *agent_settings(tmp_path),
        "training.steps=7",
        "training.problems_per_step=1",
        "rollout.samples=16",
        "optimizer.lr=2e-2",
    )
    folder = train(config, Reporter()).folder
    lines = metrics_of(folder)
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[0] < 0.3 and max(rewards) > 0.8, rewards
    assert all(line["environment/failures"] == 0 for line in lines)
    gaps = [line["engine/gap_max"] for line in lines if "engine/gap_max" in line]
    assert max(gaps) < 1e-4
    rows = pq.read_table(folder / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(rows) == 16 and all(row["answer"] == row["text"] for row in rows)


def test_a_method_without_turns_refuses_an_agent(tiny):
    config = config_of("luffy", tiny, "agent=python x.py")
    with refused("unsupported", "agent"):
        find_method(config.method.name)(config).check()


def test_an_agent_and_an_environment_are_refused(tiny):
    config = config_of("grpo", tiny, "agent=python", GUESS)
    with refused("conflict", "agent"):
        find_method(config.method.name)(config).check()
