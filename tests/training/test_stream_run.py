"""Whole runs with rollout.stream: a policy learns, and a killed run loses and repeats nothing.

The engine is in the test's process, in place of a child process, which takes seconds to start.
tests/cluster has runs with processes of their own.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from killed import run_until_killed
from tiny_runs import config_of, forkserver, metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.cluster.backends import RunModels
from postgrad.cluster.engines import engine_config, load_engine
from postgrad.cluster.host import build_host
from postgrad.model.load.tiny import make_tiny
from postgrad.training import open as run_opening
from postgrad.training.driver import train
from postgrad.training.report import Reporter

STREAM = [
    "cluster.backend=process",
    "cluster.engines=1",
    "rollout.stream=true",
    "rollout.staleness=2",
    "rollout.samples=8",
    "training.problems_per_step=4",
    "reward.workers=1",
]
VERIFIER = """
def share_of_ones(response, problem):
    return response.count("1") / max(1, len(response))
"""


@contextmanager
def open_models_here(config) -> Iterator[RunModels]:
    host = build_host(config)
    yield RunModels(host.policy, load_engine(engine_config(config)).engine, host.models)


def rewarded(folder: Path) -> str:
    file = folder / "ones.py"
    file.write_text(VERIFIER)
    return f"reward.verifier={file}:share_of_ones"


@pytest.mark.slow
def test_a_policy_learns_in_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(run_opening, "open_models", open_models_here)
    model = make_tiny(tmp_path / "model", seed=0, layers=2, width=32)
    settings = [
        *STREAM,
        rewarded(tmp_path),
        "training.steps=20",
        "rollout.max_response_tokens=16",
        "optimizer.lr=5e-3",
        "optimizer.warmup_steps=0",
        f"runs={tmp_path}",
    ]
    train(config_of("grpo", model, *settings), Reporter())
    lines = [line for line in metrics_of(tmp_path / "test") if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards
    assert all(line["staleness/max"] <= 2 for line in lines)
    assert any(line["staleness/mean"] > 0 for line in lines)
    # Old tokens differ from the policy that is trained; importance weights correct for it.
    stale = [line for line in lines if line["staleness/mean"] > 0]
    assert max(line["correction/std"] for line in stale) > 1e-3
    assert max(abs(line["correction/kl"]) for line in stale) > 1e-3
    fresh = [line for line in lines if line["staleness/max"] == 0]
    assert all(line["correction/std"] < 1e-4 for line in fresh)


def kill_in_process(step: int, arguments: list[str], output: str) -> None:
    run_opening.open_models = open_models_here
    run_until_killed(step, arguments, output)


@pytest.mark.slow
def test_a_killed_stream_trains_on_every_problem_once(tiny, tmp_path, monkeypatch):
    settings = [
        *STREAM,
        rewarded(tmp_path),
        "training.steps=8",
        "training.checkpoint_every=2",
        "rollout.max_response_tokens=12",
        f"runs={tmp_path}",
    ]
    arguments = ["train", "grpo", *overrides_of(tiny, *settings)]
    output = tmp_path / "output.txt"
    process = forkserver().Process(target=kill_in_process, args=(5, arguments, str(output)))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, output.read_text()
    folder = tmp_path / "test"
    assert (folder / "checkpoints" / "step-4" / "pending.bin").is_file()
    monkeypatch.setattr(run_opening, "open_models", open_models_here)
    assert main(arguments) == 0
    steps = [line["step"] for line in metrics_of(folder) if "step_s" in line]
    assert steps == list(range(1, 9))
    uids = []
    for step in range(1, 9):
        table = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet")
        uids += sorted(set(table["uid"].to_pylist()))
        newest = max(version for row in table["version"].to_pylist() for version in row)
        assert newest <= step - 1
    assert len(uids) == len(set(uids)) == 32, "every problem once: none lost, none twice"
