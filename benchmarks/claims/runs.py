"""Several training runs at once on one GPU: start, follow, stop, and continue later."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from claims.results import Results

POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        arm: what is compared: a method with its settings.
        label: the name of the run folder, different for each arm and seed.
        arguments: of the `postgrad` command, or of `script`.
        last_step: the run is stopped after this step and its validation, before it writes a
            checkpoint (18 GB for 1.5B parameters); 0: it ends by itself.
        validates: whether a validation follows the last step.
        script: a Python file to run instead of `postgrad`.
        keeps_policy: of its checkpoints only the models stay, without the optimizer's state.
    """

    arm: str
    seed: int
    label: str
    arguments: list[str]
    last_step: int = 0
    validates: bool = False
    script: str = ""
    keeps_policy: bool = False

    def command(self) -> list[str]:
        if self.script:
            return [sys.executable, self.script, *self.arguments]
        return [sys.executable, "-m", "postgrad.cli.main", *self.arguments]


@dataclass
class RunningRun:
    run: Run
    process: "subprocess.Popen[bytes]"
    start: float


def start_run(run: Run, out: Path) -> RunningRun:
    """Start the run as a process group of its own; its output goes to OUT/LABEL.log."""
    print(" ".join(["postgrad" if not run.script else run.script, *run.arguments]), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with (out / f"{run.label}.log").open("w") as log:
        process = subprocess.Popen(
            run.command(),
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
    return RunningRun(run, process, time.time())


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that started it, whatever ends that one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_run(item: RunningRun) -> None:
    """Kill the run and its child processes. A signal to interrupt would write a checkpoint."""
    if item.process.poll() is None:
        os.killpg(item.process.pid, signal.SIGKILL)
        item.process.wait()


def run_all(
    runs: Sequence[Run], out: Path, results: Results, jobs: int, deadline: float
) -> list[str]:
    """Run what is not finished, `jobs` at a time; return the labels of runs that are not done.

    results.jsonl gets each step when it ends, so that a kill loses nothing. At the deadline all
    runs are stopped; a later call starts them again from their first step.
    """
    waiting = [run for run in runs if run.label not in results.finished()]
    running: list[RunningRun] = []
    failed: list[str] = []
    try:
        while waiting or running:
            if time.time() > deadline:
                break
            while waiting and len(running) < jobs:
                running.append(start_run(waiting.pop(0), out))
            time.sleep(POLL_S)
            for item in list(running):
                results.follow(item.run, item.start, len(running))
                if not is_over(item, results):
                    continue
                running.remove(item)
                if finish(item, out, results):
                    failed.append(item.run.label)
    finally:
        for item in running:
            stop_run(item)
            results.follow(item.run, item.start, len(running))
    left = [*failed, *(item.run.label for item in running), *(run.label for run in waiting)]
    if left:
        print(f"not done: {', '.join(left)}; the same command continues", flush=True)
    return left


def is_over(item: RunningRun, results: Results) -> bool:
    """Return whether the process has ended, or its last step is done; then it is stopped."""
    run = item.run
    if run.last_step and results.has_step(run.label, run.last_step, run.validates):
        stop_run(item)
    return item.process.poll() is not None


def finish(item: RunningRun, out: Path, results: Results) -> int:
    """Record the end of a run; return its exit code, 0 if it reached its last step."""
    run = item.run
    results.follow(run, item.start, 1)
    seconds = time.time() - item.start
    code = item.process.returncode
    if run.last_step:
        if results.has_step(run.label, run.last_step, run.validates):
            code = 0
        checkpoints = out / "runs" / run.label / "checkpoints"
        shutil.rmtree(checkpoints, ignore_errors=True)
        shutil.rmtree(out / "runs" / f"{run.label}-warmup", ignore_errors=True)
    if run.keeps_policy:
        keep_policy(out / "runs" / run.label)
    results.add(label=run.label, exit_code=code, seconds=round(seconds, 1))
    print(f"{run.label}: exit code {code} after {seconds:.0f} s", flush=True)
    if code:
        print((out / f"{run.label}.log").read_text()[-1500:], flush=True)
    return code


def keep_policy(folder: Path) -> None:
    """Remove all but the models from the checkpoints of a finished run."""
    for path in folder.glob("checkpoints/step-*/*"):
        if path.name == "policy":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
