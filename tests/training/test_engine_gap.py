"""The engine check before the first step, and runs with engines that have their own weights."""

import json

import pytest
import torch
from openai_server import serve
from safetensors.torch import load_file
from serve_process import live
from tiny_runs import config_of, metrics_of, overrides_of, toy_run, tree

from postgrad.cli.main import main
from postgrad.cluster.engines import engine_config, load_engine
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = (
    *toy_run(steps=3, response_tokens=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture
def other_engine(tiny):
    return load_engine(engine_config(config_of("grpo", tiny))).engine


def run(tiny, runs, *overrides):
    """Train with a reward that differs within every group, so that every step updates."""
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
def native_run(tiny, tmp_path_factory):
    """Metrics of the run with the engine that shares the trainer's weights."""
    return run(tiny, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_hf_engine_gives_the_native_run(tiny, native_run, tmp_path):
    lines = run(tiny, tmp_path, "rollout.engine=hf")
    assert len(numbers(lines)) == len(lines) == 3 and not any(
        "engine/start_gap_mean" in line for line in lines
    )
    assert torch.allclose(
        torch.tensor(numbers(lines)), torch.tensor(numbers(native_run)), atol=1e-4
    )


@pytest.mark.slow
def test_server_gets_the_weights_of_every_update(tiny, native_run, tmp_path):
    """`postgrad serve` gives the native run."""
    with live(tiny, reload_below=tmp_path) as server:
        overrides = ("rollout.engine=http", f"rollout.url='{server.url}#tiny'")
        lines = run(tiny, tmp_path, *overrides, "rollout.stop=['no such string']")
        assert server.ask("/health")[1]["models"]["tiny"]["version"] >= 2
        assert lines[0]["step"] == 0 and lines[0]["engine/start_gap_max"] < 1e-4
        assert len(lines) == 4 and min(line["grad_norm"] for line in lines[1:]) > 0
        assert numbers(lines) == [
            pytest.approx(one, rel=1e-4, abs=1e-5) for one in numbers(native_run)
        ]
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
        more = run(tiny, tmp_path, *overrides, "rollout.stop=['no such string']")
        assert [line["step"] for line in more] == [0, 1, 2, 3], (
            "nothing was left to do, and nothing was written twice"
        )


@pytest.mark.slow
def test_server_without_reload_is_refused(tiny, tmp_path, capsys):
    with live(tiny) as server:
        url = f"rollout.url='{server.url}#tiny'"
        code, error = failing(capsys, tiny, "rollout.engine=http", url, f"runs={tmp_path}")
    assert code == 2 and "answers 403: this server takes no new weights" in error
    assert "start it with --reload-below DIR" in error


def failing(capsys, tiny, *overrides) -> tuple[int, str]:
    code = main(["train", "grpo", *overrides_of(tiny, *SMALL, *overrides)])
    error = capsys.readouterr().err
    assert error.startswith("postgrad: ") and error.count("\n") == 1, error
    return code, error


@pytest.mark.slow
def test_engine_that_ignores_new_weights_stops_the_run(
    tiny, tmp_path, other_engine, prompts, capsys
):
    with serve(
        engine=other_engine,
        prompts=prompts,
        calls={"/v1/reload": lambda body: {"took": body["folder"]}},
    ) as served:
        code, error = failing(
            capsys, tiny, "rollout.engine=http", f"rollout.url={served.address}", f"runs={tmp_path}"
        )
    assert code == 1 and "rollout.engine=http does not take new weights" in error


@pytest.mark.slow
def test_engine_with_other_weights_stops_the_run(tiny, tmp_path, other_engine, prompts, capsys):
    def reload(body):
        weights = load_file(f"{body['folder']}/model.safetensors")
        other_engine.publish({name: w * 1.2 if "mlp" in name else w for name, w in weights.items()})
        return {}

    with serve(engine=other_engine, prompts=prompts, calls={"/v1/reload": reload}) as served:
        overrides = (
            "rollout.engine=http",
            f"rollout.url={served.address}",
            f"runs={tmp_path}",
            "training.steps=1",
        )
        code, error = failing(capsys, tiny, *overrides)
        assert code == 1 and "(limit 0.01, rollout.max_logprob_difference)" in error
        assert main(
            [
                "train",
                "grpo",
                *overrides_of(
                    tiny, *SMALL, *overrides, "name=wide", "rollout.max_logprob_difference=50"
                ),
            ]
        ) in (0, 1)
        started = metrics_of(tmp_path / "wide")[0]
        assert 0.01 < started["engine/start_gap_mean"] < 50


def test_missing_vllm_and_vllm_without_device_are_one_line(tiny, tmp_path, capsys, monkeypatch):
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
