"""examples/verifiers_agent.py, and the real package verifiers against `postgrad serve`.

The package needs other versions of openai and mcp than the tests, so it is not among the test
dependencies. In an environment that has it: `pip install verifiers`, then run this file.
"""

import io
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from test_agents import LETTERS
from tiny_runs import EXAMPLES
from tool_model import PLAIN_CHAT, chat_tokenizer

from postgrad.agents.runner import Agents
from postgrad.config.schema import AgentConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.problem import Problem
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.turns import run_turns
from postgrad.user_code import load_module

EXAMPLE = EXAMPLES / "verifiers_agent.py"


def test_the_uid_or_the_index_chooses_the_task():
    task_number = load_module(str(EXAMPLE), "agent").task_number
    assert task_number({"uid": "seed-12", "extra": {}}) == 12
    assert task_number({"uid": "seed-12", "extra": {"index": 3}}) == 3


class FakeEnvironment:
    """Has the calls of an environment of verifiers; its reward is the number of the task."""

    def __init__(self, config):
        self.config = config
        self.taskset = type("Tasks", (list,), {"bounded": True})(range(5))

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        assert context == ("policy", "http://127.0.0.1:1/v1") and self.config["max_turns"] == 4
        metrics = {"length": 7.0, "unknown": None}
        traces = [
            SimpleNamespace(agent=SimpleNamespace(trainable=one), metrics=metrics, reward=reward)
            for one, reward in ((True, float(task)), (False, 9.0))
        ]
        return SimpleNamespace(ok=True, traces=traces)


def test_it_plays_the_task_of_its_problem_and_prints_the_reward(monkeypatch, capsys):
    """Against a stand-in of the package; the real one is in the next test."""
    vf = SimpleNamespace(
        AgentConfig=dict,
        EvalClientConfig=lambda base_url, api_key_var: base_url,
        ModelContext=lambda model, client: (model, client),
    )
    loaders = SimpleNamespace(
        env_config_type=lambda taskset, name: SimpleNamespace(model_fields={}),
        resolve_env_config=lambda config: config,
        load_environment=FakeEnvironment,
    )
    fakes = {"": SimpleNamespace(v1=vf), ".v1": vf, ".v1.utils": SimpleNamespace(loaders=loaders)}
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, f"verifiers{name}", module)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "sums", "--env", '{"max_turns": 4}'])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"uid": "seed-8", "extra": {}})))
    load_module(str(EXAMPLE), "agent").main()
    assert json.loads(capsys.readouterr().out) == {"length": 7.0, "reward": 3.0}


@pytest.mark.slow
def test_a_verifiers_environment_is_an_agent(monkeypatch, tmp_path):
    pytest.importorskip("verifiers.v1", reason="needs verifiers>=0.4")
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    monkeypatch.setenv("HOME", str(tmp_path))
    prompts = Encoder(chat_tokenizer(LETTERS, PLAIN_CHAT), "chat", 500)
    engine = FakeEngine(lambda prompt, seed: prompts.encode_response("it is 3"))
    command = f"{sys.executable} {EXAMPLE} vf_sums"
    agents = Agents(AgentConfig(command, timeout_s=200), prompts, "auto")
    problems = [Problem(f"seed-{i}", ({"role": "user", "content": ""},), "") for i in (2, 3)]
    requests = [Request(prompts.prompt(problem), [7]) for problem in problems]
    try:
        done = run_turns(engine, requests, problems, Sampling(max_new_tokens=50), agents)
    finally:
        agents.close()
    right, wrong = (group[0] for group in done)
    assert right.episode.failure is None, right.episode.failure
    assert (right.episode.reward, wrong.episode.reward) == (1.0, 0.0)
    assert right.episode.parts["length"] == 7.0 and right.episode.question == "2+1="
    assert prompts.decode(right.policy_tokens) == "it is 3"


@pytest.mark.slow
def test_the_train_client_of_verifiers_samples_from_the_server(tiny, monkeypatch):
    """Its response has the server's tokens and log-probs; it checks their names itself."""
    pytest.importorskip("verifiers.v1", reason="needs verifiers>=0.4")
    import asyncio

    import openai
    from renderers.client import generate
    from serve_process import live

    class Renderer:
        """Stands in for a model's renderer: the prompt is given as tokens."""

        def get_stop_token_ids(self):
            return []

        def parse_response(self, ids, prompt_ids, tools):
            from renderers.base import ParsedResponse

            return ParsedResponse(content=str(ids))

    async def ask(url):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await generate(
                client=client,
                renderer=Renderer(),  # type: ignore[arg-type]
                messages=[],
                model="tiny",
                prompt_ids=[1, 10, 2, 15],
                sampling_params={"temperature": 1.0, "max_tokens": 5, "seed": 3},
            )

    with live(tiny) as server:
        result = asyncio.run(ask(server.url))
        body = {"model": "tiny", "prompt": [1, 10, 2, 15], "max_tokens": 5, "seed": 3}
        expected = server.ask("/v1/completions", body | {"return_token_ids": True, "logprobs": 0})
    choice = expected[1]["choices"][0]
    assert result["completion_ids"] == choice["token_ids"]
    assert result["completion_logprobs"] == choice["logprobs"]["token_logprobs"]
