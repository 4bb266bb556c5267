"""Runs that are killed with SIGKILL and continued must end with the same bytes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from world import config_of, metrics_of, metrics_without_timing, overrides_of, tree

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.report import Reporter

KILLER = """
import os, signal, sys
from postgrad.cli.main import main
from postgrad.training.log import RunLog
real = RunLog.write
def write(self, number, metrics):
    line = real(self, number, metrics)
    if number == {step} and "step_s" in metrics:  # not the line of a validation
        os.kill(os.getpid(), signal.SIGKILL)
    return line
RunLog.write = write
sys.exit(main(sys.argv[1:]))
"""


def assert_a_killed_run_ends_the_same(
    recipe: str, model: Path, folder: Path, kill_at: int, overrides: list[str]
) -> list[dict]:
    """Kills a real process after a step was logged and before it was saved.

    The rerun is bit-exact.
    """
    whole, killed = folder / "whole", folder / "killed"
    train(config_of(recipe, model, *overrides, f"runs={whole}"), Reporter())
    again = ["train", recipe, *overrides_of(model, *overrides, f"runs={killed}")]
    command = [sys.executable, "-c", KILLER.format(step=kill_at), *again]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert metrics_of(killed / "test")[-1]["step"] == kill_at, "killed elsewhere"
    assert main(again) == 0
    whole_files = tree(whole / "test" / "checkpoints")
    killed_files = tree(killed / "test" / "checkpoints")
    assert whole_files.keys() == killed_files.keys()
    differing = [name for name in whole_files if whole_files[name] != killed_files[name]]
    assert not differing, differing
    assert metrics_without_timing(whole / "test") == metrics_without_timing(killed / "test")
    for file in sorted((whole / "test" / "rollouts").iterdir()):
        assert pq.read_table(file).equals(
            pq.read_table(killed / "test" / "rollouts" / file.name)
        ), file.name
    return metrics_of(whole / "test")
