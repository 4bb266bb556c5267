"""Runs that are killed with SIGKILL and continued must end with the same bytes."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from tiny_runs import (
    config_of,
    forkserver,
    metrics_of,
    metrics_without_timing,
    overrides_of,
    run_words,
    tree,
)

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.log import RunLog
from postgrad.training.report import Reporter


def run_until_killed(step: int, arguments: list[str], output: str) -> None:
    """Runs the command in a forked process, which gets SIGKILL after a step was logged."""
    write = RunLog.write

    def write_and_kill(self: RunLog, number: int, metrics: dict[str, float]) -> dict[str, float]:
        line = write(self, number, metrics)
        if number == step and "step_s" in metrics:  # not the line of a validation
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    RunLog.write = write_and_kill  # type: ignore[method-assign]
    run_words(arguments, output)


def assert_a_killed_run_ends_the_same(
    recipe: str,
    model: Path,
    folder: Path,
    kill_at: int,
    overrides: list[str],
    killed_in: Sequence[str] = (),
) -> list[dict]:
    """Kills a real process after a step was logged and before it was saved.

    The rerun is bit-exact. `killed_in` has settings of the killed process alone, such as a place
    of the models.
    """
    complete, killed = folder / "complete", folder / "killed"
    train(config_of(recipe, model, *overrides, f"runs={complete}"), Reporter())
    again = ["train", recipe, *overrides_of(model, *overrides, f"runs={killed}")]
    output = folder / "output.txt"
    killed_words = [*again, *killed_in]
    process = forkserver().Process(
        target=run_until_killed, args=(kill_at, killed_words, str(output))
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, output.read_text()
    assert metrics_of(killed / "test")[-1]["step"] == kill_at, "killed elsewhere"
    assert main(again) == 0
    complete_files = tree(complete / "test" / "checkpoints")
    killed_files = tree(killed / "test" / "checkpoints")
    assert complete_files.keys() == killed_files.keys()
    differing = [name for name in complete_files if complete_files[name] != killed_files[name]]
    assert not differing, differing
    assert metrics_without_timing(complete / "test") == metrics_without_timing(killed / "test")
    for file in sorted((complete / "test" / "rollouts").iterdir()):
        assert pq.read_table(file).equals(
            pq.read_table(killed / "test" / "rollouts" / file.name)
        ), file.name
    return metrics_of(complete / "test")
