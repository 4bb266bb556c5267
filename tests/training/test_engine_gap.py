"""The check before the first step, and whole runs with engines that keep weights of their own."""

import json

import pytest
import torch
from safetensors.torch import load_file
from served import serve
from world import config_of, metrics_of, overrides_of, toy_run, tree

from postgrad.cli.main import main
from postgrad.cluster.engines import engine_config, load_engine
from postgrad.rollout import http
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = (
    *toy_run(steps=3, response_tokens=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture
def apart(tiny):
    return load_engine(engine_config(config_of("grpo", tiny))).engine


def run(tiny, runs, *overrides):
    """A run whose reward differs within every group, so that every step is an update."""
    file = runs / "mine.py"
    file.write_text("def varied(response, problem):\n    return sum(map(ord, response)) % 7 / 7\n")
    config = config_of(
        "grpo", tiny, *SMALL, f"runs={runs}", f"reward.verifier={file}:varied", *overrides
    )
    return metrics_of(train(config, Reporter()).folder)


def numbers(lines) -> list[list[float]]:
    return [
        [line[name] for name in ("reward/mean", "response/length", "loss", "grad_norm")]
        for line in lines
        if "loss" in line
    ]


@pytest.fixture(scope="module")
def truth(tiny, tmp_path_factory):
    """The run with the engine that shares the trainer's weights."""
    return run(tiny, tmp_path_factory.mktemp("runs"))


def test_hf_gives_the_run_that_native_gives(tiny, truth, tmp_path):
    lines = run(tiny, tmp_path, "rollout.engine=hf")
    assert len(numbers(lines)) == len(lines) == 3 and not any(
        "engine/start_gap_mean" in line for line in lines
    )
    assert torch.allclose(torch.tensor(numbers(lines)), torch.tensor(numbers(truth)), atol=1e-4)


def test_a_server_follows_every_update_of_a_run(tiny, tmp_path, apart, prompts):
    reload = lambda body: apart.publish(load_file(f"{body['folder']}/model.safetensors"))  # noqa: E731
    with serve(engine=apart, prompts=prompts, calls={"/v1/reload": reload}) as served:
        overrides = ("rollout.engine=http", f"rollout.url={served.address}")
        lines = run(tiny, tmp_path, *overrides)
        assert lines[0]["step"] == 0 and lines[0]["engine/start_gap_max"] < 1e-4
        assert len(lines) == 4 and min(line["grad_norm"] for line in lines[1:]) > 0
        assert max(line["engine/gap_max"] for line in lines[1:]) < 1e-4
        notes = [
            json.loads(line)
            for line in (tmp_path / "test" / "events.jsonl").read_text().splitlines()
        ]
        assert any(
            note["event"] == "note" and note["text"].startswith("engine and trainer agree")
            for note in notes
        )
        assert not list((tmp_path / "test" / "weights").iterdir())
        more = run(tiny, tmp_path, *overrides, "training.steps=3")
        assert [line["step"] for line in more] == [0, 1, 2, 3], (
            "nothing was left to do, and nothing was written twice"
        )


def failing(capsys, tiny, *overrides) -> tuple[int, str]:
    code = main(["train", "grpo", *overrides_of(tiny, *SMALL, *overrides)])
    error = capsys.readouterr().err
    assert error.startswith("postgrad: ") and error.count("\n") == 1, error
    return code, error


def test_an_engine_that_weights_do_not_reach_stops_the_run(tiny, tmp_path, apart, prompts, capsys):
    with serve(
        engine=apart, prompts=prompts, calls={"/v1/reload": lambda body: {"took": body["folder"]}}
    ) as served:
        code, error = failing(
            capsys, tiny, "rollout.engine=http", f"rollout.url={served.address}", f"runs={tmp_path}"
        )
    assert code == 1 and "rollout.engine=http does not take new weights" in error


def test_an_engine_that_is_another_policy_stops_the_run_above_the_bound(
    tiny, tmp_path, apart, prompts, capsys
):
    def reload(body):
        weights = load_file(f"{body['folder']}/model.safetensors")
        apart.publish({name: w * 1.2 if "mlp" in name else w for name, w in weights.items()})
        return {}

    with serve(engine=apart, prompts=prompts, calls={"/v1/reload": reload}) as served:
        overrides = (
            "rollout.engine=http",
            f"rollout.url={served.address}",
            f"runs={tmp_path}",
            "training.steps=1",
        )
        code, error = failing(capsys, tiny, *overrides)
        assert code == 1 and "(limit 0.01, rollout.max_gap)" in error
        assert main(
            [
                "train",
                "grpo",
                *overrides_of(tiny, *SMALL, *overrides, "name=wide", "rollout.max_gap=50"),
            ]
        ) in (0, 1)
        started = metrics_of(tmp_path / "wide")[0]
        assert 0.01 < started["engine/start_gap_mean"] < 50


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["rollout.engine=http"], "rollout.url=http://host:8000/v1#model"),
        (["rollout.url=http://127.0.0.1:9/v1#m"], "rollout.url=http://127.0.0.1:9/v1#m"),
        (["rollout.engine=http", "rollout.url=nowhere"], "nowhere is not a model behind a server"),
        (
            ["rollout.engine=http", "rollout.url=http://127.0.0.1:9/v1#m"],
            "http://127.0.0.1:9/v1 did not answer GET",
        ),
        (
            [
                "rollout.engine=http",
                "rollout.url=http://h/v1#m",
                "cluster.engine_apart=true",
                "cluster.backend=process",
            ],
            "cluster.engine_apart",
        ),
        (["rollout.engine=vlm"], "vllm"),
    ],
)
def test_engines_that_cannot_be_had_are_one_line_and_nothing_is_written(
    overrides, part, tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(http, "START_S", 0.3)
    code, error = failing(capsys, tiny, f"runs={tmp_path}", *overrides)
    assert code == 2 and part in error and not tree(tmp_path)


def test_vllm_that_is_not_there_or_finds_no_device_is_one_line(tiny, tmp_path, capsys, monkeypatch):
    import importlib.util

    from postgrad.rollout import vllm

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else real(name, *rest),
    )
    code, error = failing(capsys, tiny, f"runs={tmp_path}", "rollout.engine=vllm")
    assert code == 2 and "rollout.engine=vllm needs vLLM: pip install 'postgrad[vllm]'" in error
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: real("json") if name == "vllm" else real(name, *rest),
    )
    monkeypatch.setattr(vllm, "platform", lambda: "")
    code, error = failing(capsys, tiny, f"runs={tmp_path}", "rollout.engine=vllm")
    assert code == 2 and "finds no device it can run on" in error and not tree(tmp_path)
