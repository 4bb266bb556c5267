"""The actor on Ray that runs verifiers. Imports no torch; messages are JSON."""

import json
import os
import sys
from pathlib import Path

from postgrad.cluster.ports import to_exception
from postgrad.errors import ConfigError, RunError
from postgrad.problem import Failure, Problem, Score, problem_from, sent_fields
from postgrad.processes.channel import to_json
from postgrad.verifiers.pool import VerifierPool


class VerifierActor:
    """An actor with its own pool of verifier processes.

    `folder` and `paths` are the driver's working directory and import paths, so that a user's
    verifier is found as on the driver.
    """

    def __init__(self, workers: int, timeout_s: float, folder: str, paths: list[str]) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        sys.path.extend(path for path in paths if path not in sys.path)
        self.pool = VerifierPool(workers, timeout_s)

    def ready(self) -> bytes:
        """Return as soon as the actor runs."""
        return b""

    def verify(self, message: bytes) -> bytes:
        """Return ["ok", verdicts] of an encoded chunk, or ["config" | "error", message]."""
        chunk = json.loads(message)
        problems = [problem_from(data) for data in chunk["problems"]]
        items = [(response, problems[index]) for index, response, _ in chunk["items"]]
        names = [name for _, _, name in chunk["items"]]
        try:
            verdicts = self.pool.verify(items, names)
        except ConfigError as error:
            return to_json(["config", error.to_wire()])
        except RunError as error:
            return to_json(["error", str(error)])
        return to_json(["ok", [_verdict_to_json(verdict) for verdict in verdicts]])


def _verdict_to_json(verdict: Score | Failure) -> list[object]:
    if isinstance(verdict, Score):
        return [verdict.value, verdict.parts]
    return [verdict.kind, verdict.reason]


def encode_chunk(items: list[tuple[str, Problem]], names: list[str]) -> bytes:
    """Return the message for (response, problem) items; a shared problem is sent once."""
    problems = {id(problem): problem for _, problem in items}
    index_of = {key: index for index, key in enumerate(problems)}
    rows: list[list[object]] = []
    for (response, problem), name in zip(items, names, strict=True):
        rows.append([index_of[id(problem)], response, name])
    return to_json(
        {"problems": [sent_fields(problem) for problem in problems.values()], "items": rows}
    )


def decode_verdicts(message: bytes) -> list[Score | Failure]:
    """Return the verdicts of an actor. Raises the actor's ConfigError or RunError."""
    status, verdicts = json.loads(message)
    if status != "ok":
        raise to_exception(status, verdicts)
    return [
        Failure(first, second) if isinstance(first, str) else Score(first, second)
        for first, second in verdicts
    ]
