"""Starts the program of an agent, with a time limit, and reads its reward."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.pictures import with_pictures, with_urls
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.port import as_score

TAIL_BYTES = 65536  # of the output, from its end, that is read
KILLED = Failure("killed", "the run has ended")
LAUNCHER = str(Path(__file__).with_name("launch.py"))


class Program:
    """One run of the user's program.

    Args:
        command: the program and its arguments.
        problem: written as JSON to its standard input, and to the file POSTGRAD_PROBLEM.
        variables: environment variables, such as OPENAI_BASE_URL.
        timeout_s: time limit.
    """

    def __init__(
        self,
        command: Sequence[str],
        problem: Problem,
        variables: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self.command = list(command)
        self.problem = problem
        self.variables = dict(variables)
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._killed = False

    def run(self) -> Score | Failure | None:
        """Run the program to its end; returns the reward that it printed, or why it failed.

        Kills it, and all that it started, at the time limit.
        """
        with tempfile.TemporaryDirectory(prefix="postgrad-agent-") as folder:
            place = Path(folder)
            problem_file = place / "problem.json"
            problem_file.write_text(json.dumps(problem_fields(self.problem), default=str))
            variables = self.variables | {"POSTGRAD_PROBLEM": str(problem_file)}
            with (
                problem_file.open("rb") as stdin,
                (place / "out").open("wb") as out,
                (place / "err").open("wb") as err,
            ):
                if not self._start(stdin, out, err, variables):
                    return KILLED
                code = self._wait()
            return self._result(code, _tail(place / "out"), _tail(place / "err"))

    def kill(self) -> None:
        """Kill the program and the processes of its group."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self, stdin: Any, out: Any, err: Any, variables: dict[str, str]) -> bool:
        with self._lock:
            if self._killed:
                return False
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", LAUNCHER, str(os.getpid()), *self.command],
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,  # no Ctrl-C for it; its whole group can be killed
                env=os.environ | variables,
            )
        return True

    def _wait(self) -> int | None:
        """Return the exit code; None when the time limit has passed."""
        process = self._process
        assert process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(self.timeout_s)
        # Also what the program left running.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return code

    def _result(self, code: int | None, output: str, errors: str) -> Score | Failure | None:
        if self._killed:
            return KILLED
        if code is None:
            reason = f"the program took longer than agent.timeout_s={self.timeout_s:g}"
            return Failure("timeout", reason)
        if code:
            reason = f"the program ended with exit code {code}: {_last_line(errors)[:200]}"
            return Failure("exit", reason)
        return read_reward(output)


def problem_fields(problem: Problem) -> dict[str, Any]:
    """Return the fields of a problem that its program reads."""
    return {
        "uid": problem.uid,
        "messages": [with_urls(one) for one in with_pictures(problem.messages, problem.images)],
        "ground_truth": problem.ground_truth,
        "data_source": problem.data_source,
        "extra": problem.extra,
    }


def read_reward(output: str) -> Score | Failure | None:
    """Return the reward in the last line of the output; None if the line is no JSON of a reward.

    A reward is a number, or an object with `reward` (or `score`) whose other numbers are its parts.
    An object or number that is not finite is Failure("invalid").
    """
    try:
        value = json.loads(_last_line(output))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        if "reward" in value:
            value["score"] = value.pop("reward")
        if "score" not in value:
            return None
    elif not isinstance(value, int | float):
        return None
    score = as_score(value)
    if isinstance(score, Failure):
        return Failure(score.kind, score.reason.replace("the verifier", "the program"))
    return score


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _tail(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return stream.read().decode(errors="replace")
