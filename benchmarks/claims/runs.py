"""Several training runs at once on one GPU: start, follow, stop, and continue later."""

import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from claims.results import Results

HERE = Path(__file__).resolve().parent
POLL_S = 0.2
DRAIN_S = 2.0  # for kernels that are queued
STARTED = "RUN_STARTED"  # environment variable: when the process was started
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
        seconds: the run is stopped when it has used so many, without its validations.
        script: a Python file to run instead of `postgrad`.
        keeps_policy: of its checkpoints only the models stay, without the optimizer's state.
        places: how many of the `jobs` it takes, such as 2 for PPO, which trains two models.
    """

    arm: str
    seed: int
    label: str
    arguments: list[str]
    last_step: int = 0
    validates: bool = False
    script: str = ""
    keeps_policy: bool = False
    places: int = 1
    seconds: float = math.inf

    def command(self, waits: bool = False) -> list[str]:
        """Return the command; one that waits starts when it reads a line."""
        if self.script:
            return [sys.executable, self.script, *self.arguments]
        program = [str(HERE / "warm.py")] if waits else ["-m", "postgrad.cli.main"]
        return [sys.executable, *program, *self.arguments]


@dataclass
class RunningRun:
    run: Run
    process: "subprocess.Popen[bytes]"
    start: float


def start_run(run: Run, out: Path, waits: bool = False) -> RunningRun:
    """Start the run as a process group of its own; its output goes to OUT/LABEL.log.

    With `waits`, it imports its packages and waits for `begin_run`.
    """
    waits = waits and not run.script
    if not waits:
        print_command(run)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", STARTED: str(time.time())}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with (out / f"{run.label}.log").open("w") as log:
        process = subprocess.Popen(
            run.command(waits),
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
    return RunningRun(run, process, time.time())


def begin_run(item: RunningRun) -> RunningRun:
    """Let a run go on that waits; its time is counted from here."""
    if item.process.stdin is not None:
        print_command(item.run)
        with suppress(BrokenPipeError):  # it has failed, as its log says
            item.process.stdin.write(b"go\n")
            item.process.stdin.close()
        item.start = time.time()
    return item


def print_command(run: Run) -> None:
    print(" ".join([run.script or "postgrad", *run.arguments]), flush=True)


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that started it, whatever ends that one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_run(item: RunningRun) -> None:
    """Kill the run and its child processes. A signal to interrupt would write a checkpoint.

    They are halted first, so that no kernel runs: under NVIDIA's MPS, killing a process with a
    kernel in flight ends all others on the GPU.
    """
    if item.process.poll() is None:
        os.killpg(item.process.pid, signal.SIGSTOP)
        time.sleep(DRAIN_S)
        os.killpg(item.process.pid, signal.SIGKILL)
        item.process.wait()


def run_all(
    runs: Sequence[Run],
    out: Path,
    results: Results,
    jobs: int,
    deadline: float,
    num_warm: int = 0,
) -> list[str]:
    """Run what is not finished, `jobs` at a time; return the labels of runs that are not done.

    results.jsonl gets each step when it ends, so that a kill loses nothing. At the deadline all
    runs are stopped; a later call starts them again from their first step, in an empty folder.
    Runs that were out of memory are tried once more at the end, one at a time. `num_warm` further
    runs import their packages while others compute. Then times do not include the imports, so it is
    not for comparisons with other programs by time.
    """
    unfinished = [run for run in runs if run.label not in results.finished()]
    failed, left = run_several(unfinished, out, results, jobs, deadline, num_warm)
    again = [run for run in failed if is_out_of_memory(out / f"{run.label}.log")]
    if again and not left and jobs > 1:
        print(f"once more, alone: {', '.join(run.label for run in again)}", flush=True)
        failed = [run for run in failed if run not in again]
        more, left = run_several(again, out, results, 1, deadline, 0)
        failed += more
    labels = [run.label for run in [*failed, *left]]
    if labels:
        print(f"not done: {', '.join(labels)}; the same command continues", flush=True)
    return labels


def run_several(
    runs: Sequence[Run], out: Path, results: Results, jobs: int, deadline: float, num_warm: int
) -> tuple[list[Run], list[Run]]:
    """Run all until the deadline; return those that failed, and those that did not end."""
    waiting = list(runs)
    for run in waiting:
        forget(run, out, results)
    warm: list[RunningRun] = []
    running: list[RunningRun] = []
    failed: list[Run] = []
    try:
        while waiting or warm or running:
            if time.time() > deadline:
                break
            while waiting or warm:
                used = sum(item.run.places for item in running)
                if used and used + (warm[0].run if warm else waiting[0]).places > jobs:
                    break
                running.append(begin_run(warm.pop(0) if warm else start_run(waiting.pop(0), out)))
            while waiting and len(warm) < num_warm:
                warm.append(start_run(waiting.pop(0), out, waits=True))
            time.sleep(POLL_S)
            for item in list(running):
                results.follow(item.run, item.start, len(running))
                if not is_over(item, results):
                    continue
                running.remove(item)
                if finish(item, out, results):
                    failed.append(item.run)
    finally:
        for item in warm:
            stop_run(item)
        for item in running:
            stop_run(item)
            results.follow(item.run, item.start, len(running))
    return failed, [*(item.run for item in [*running, *warm]), *waiting]


def forget(run: Run, out: Path, results: Results) -> None:
    """Remove the folder of a run that did not finish: it may have other settings."""
    shutil.rmtree(out / "runs" / run.label, ignore_errors=True)
    results.forget(run.label)


def is_out_of_memory(log: Path) -> bool:
    return log.is_file() and "out of memory" in log.read_text()


def is_over(item: RunningRun, results: Results) -> bool:
    """Return whether the process has ended, or its last step is done; then it is stopped."""
    run = item.run
    if run.last_step and results.has_step(run.label, run.last_step, run.validates):
        stop_run(item)
    if results.clocks.get(run.label, 0.0) > run.seconds:
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
        if results.clocks.get(run.label, 0.0) > run.seconds:
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
