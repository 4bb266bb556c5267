"""`postgrad serve` where vLLM is installed, which it chooses by itself.

`make test-vllm` runs these tests.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from serve_process import wait_for
from tiny_runs import config_of, metrics_of, overrides_of, sharpened

from postgrad.cli.main import main
from postgrad.cluster.host import build_host
from postgrad.data.render import Prompts
from postgrad.model.load import load_tokenizer
from postgrad.model.tiny import make_tiny
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.rollout.served_path import parse_served_path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
]
TOKEN = "a-secret-word"
PROMPT = [1, 10, 2, 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = sharpened(
        make_tiny(tmp_path_factory.mktemp("models") / "wide", seed=0, layers=2, width=128, heads=2)
    )
    tokenizer = load_tokenizer(config_of("grpo", folder).model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """The servers file of a running server; Ctrl-C ends it with code 0 and removes its entry."""
    folder = tmp_path_factory.mktemp("served")
    file = folder / "servers.json"
    (folder / "token").write_text(TOKEN)
    overrides = [
        "--port",
        "0",
        "--name",
        "mate",
        "--servers",
        str(file),
        "--token-file",
        str(folder / "token"),
    ]
    more = ["--context", "256", "--rows", "16", "--dtype", "float32"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "postgrad.cli.main", "serve", str(model), *overrides, *more],
            stdout=log,
            stderr=log,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    try:
        wait_for(lambda: file.exists() or process.poll() is not None, "vLLM's server", 600)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        assert (folder / "log").read_text().startswith("engine: vllm (installed, ")
        yield file
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and json.loads(file.read_text()) == {}
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("POSTGRAD_API_KEY", TOKEN)


@pytest.fixture(scope="module")
def native(model):
    return build_host(config_of("grpo", model)).engine


def test_the_official_client_gets_what_the_native_engine_says(servers, native, model):
    import openai

    greedy = native.generate([Request(PROMPT, [0])], Sampling(0.0, 12))[0][0]
    text = Prompts(load_tokenizer(config_of("grpo", model).model), "plain").decode(greedy.tokens)
    url = parse_served_path(f"{servers}#mate")[0].partition("#")[0]
    with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
        done = client.completions.create(
            model="mate",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            extra_body={"return_token_ids": True},
        ).choices[0]
        assert (
            done.token_ids == greedy.tokens
            and done.text == text
            and done.finish_reason == greedy.finish
        )
        assert done.logprobs.token_logprobs == pytest.approx(greedy.logprobs, abs=1e-3)
        chat = {
            "model": "mate",
            "messages": [{"role": "user", "content": "1+2="}],
            "max_tokens": 12,
            "temperature": 0,
        }
        assert client.chat.completions.create(**chat).choices[0].message.content == text
        pieces = list(client.chat.completions.create(**chat, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_our_engine_over_http_and_its_stop_strings(servers, native, model):
    prompts = Prompts(load_tokenizer(config_of("grpo", model).model), "plain")
    engine = HttpEngine(Address.parse(parse_served_path(f"{servers}#mate")[0]), prompts, 60)
    requests = [
        Request(PROMPT, [1]),
        Request([7, 15], [2]),
        Request([3, 4, 10, 5, 15], [2**64 - 9]),
    ]
    free = native.generate(requests, Sampling(0.0, 12))
    stop = next(text[2:4] for group in free if len(text := prompts.decode(group[0].tokens)) > 5)
    for sampling in (Sampling(0.0, 12), Sampling(0.0, 12, stop=(stop,))):
        ours, theirs = native.generate(requests, sampling), engine.generate(requests, sampling)
        assert [[(c.tokens, c.finish) for c in g] for g in theirs] == [
            [(c.tokens, c.finish) for c in g] for g in ours
        ]
    assert any(prompts.decode(group[0].tokens).endswith(stop) for group in theirs)
    drawn = engine.generate(requests, Sampling(1.0, 8))
    assert engine.generate(requests, Sampling(1.0, 8)) == drawn and engine.takes_ids, (
        "seeds of all 64 bits are taken"
    )


def test_a_classmate_behind_vllm_by_the_mapping_file(servers, model, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def sevens(response, problem):\n    return response.count('7') / 4\n"
    )
    overrides = (
        "training.steps=2",
        "training.problems_per_step=2",
        "rollout.samples=4",
        "rollout.max_response_tokens=6",
        "reward.workers=1",
        "method.classmate_max_tokens=4",
        "method.condition=always",
        "method.classmate_temperature=0",
        "method.reward_type=remove_wo_cot",
        f"reward.verifier={tmp_path / 'mine.py'}:sevens",
        f"runs={tmp_path}",
    )
    for name, mate in {"vllm": f"{servers}#mate", "here": ""}.items():
        assert (
            main(
                [
                    "train",
                    "classmate",
                    *overrides_of(model, *overrides),
                    f"method.classmates=['{mate}']",
                    f"name={name}",
                ]
            )
            == 0
        )
    rewards = [
        [line.get("reward/classmate") for line in metrics_of(tmp_path / name)]
        for name in ("vllm", "here")
    ]
    assert (
        rewards[0] == pytest.approx(rewards[1]) and len(rewards[0]) == 2 and None not in rewards[0]
    )
