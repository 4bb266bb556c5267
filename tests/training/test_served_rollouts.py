"""Rollouts from `postgrad serve`: the server gets new weights, so the run is the native run."""

import pytest
from serve_process import live
from tiny_runs import metrics_of, overrides_of, toy_run

from postgrad.cli.main import main


@pytest.mark.slow
def test_run_with_served_rollouts_is_the_native_run(tiny, tmp_path):
    verifier = tmp_path / "mine.py"
    verifier.write_text("def sevens(response, problem):\n    return response.count('7') / 4\n")
    small = toy_run(steps=3, response_tokens=8)
    overrides = [
        *overrides_of(tiny, *small, "optimizer.lr=1e-2", f"runs={tmp_path}"),
        f"reward.verifier={verifier}:sevens",
    ]
    assert main(["train", "grpo", *overrides, "name=here"]) == 0
    with live(tiny, reload_below=tmp_path) as server:
        served = ["rollout.engine=http", f"rollout.url='{server.url}#tiny'"]
        assert (
            main(
                [
                    "train",
                    "grpo",
                    *overrides,
                    *served,
                    "name=there",
                    "rollout.stop=['no such string']",
                ]
            )
            == 0
        )
        assert server.ask("/health")[1]["models"]["tiny"]["version"] >= 2, (
            "new weights after each step"
        )
    kept = ("reward/mean", "loss", "grad_norm", "response/length")
    here, there = (
        [{k: line.get(k) for k in kept} for line in metrics_of(tmp_path / name) if "loss" in line]
        for name in ("here", "there")
    )
    assert here[0]["grad_norm"] > 0 and len(here) == len(there) == 3
    for one, two in zip(here, there, strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_server_without_reload_is_refused(tiny, tmp_path, capsys):
    with live(tiny) as server:
        served = ["rollout.engine=http", f"rollout.url='{server.url}#tiny'", f"runs={tmp_path}"]
        assert main(["train", "grpo", *overrides_of(tiny), *served]) == 2
    assert (
        "answers 403: this server takes no new weights; start it with --reload-below DIR"
        in capsys.readouterr().err
    )
