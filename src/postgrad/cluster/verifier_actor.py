"""A verifier pool on another machine: what an actor of the cluster holds. Imports no torch; what crosses is JSON."""

import json
import os
import sys
from pathlib import Path

from postgrad.errors import ConfigError, RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.child import decode_problem, encode
from postgrad.verifiers.pool import VerifierPool


class VerifierActor:
    """A pool with child processes of its own. `folder` and `paths` are the driver's: verifiers are looked for where it finds them."""

    def __init__(self, workers: int, timeout_s: float, folder: str, paths: list[str]) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        sys.path.extend(path for path in paths if path not in sys.path)
        self.pool = VerifierPool(workers, timeout_s)

    def ready(self) -> bytes:
        """Answers once the actor is there."""
        return b""

    def verify(self, chunk: bytes) -> bytes:
        """The verdicts of a chunk, or ["config" | "error", words]."""
        message = json.loads(chunk)
        problems = [decode_problem(data) for data in message["problems"]]
        items = [(response, problems[index]) for index, response, _ in message["items"]]
        try:
            found = self.pool.verify(items, [name for _, _, name in message["items"]])
        except (ConfigError, RunError) as error:
            return encode(["config" if isinstance(error, ConfigError) else "error", str(error)])
        return encode(
            [
                "ok",
                [[v.value, v.parts] if isinstance(v, Score) else [v.kind, v.reason] for v in found],
            ]
        )


def chunk_of(items: list[tuple[str, Problem]], names: list[str]) -> bytes:
    """The message for these items; a problem that several of them share travels once."""
    problems = {id(problem): problem for _, problem in items}
    numbers = {key: i for i, key in enumerate(problems)}
    plain = [
        [numbers[id(problem)], response, name]
        for (response, problem), name in zip(items, names, strict=True)
    ]
    return encode({"problems": [vars(problem) for problem in problems.values()], "items": plain})


def verdicts_of(answer: bytes) -> list[Score | Failure]:
    """What an actor found. Raises its ConfigError or RunError."""
    kind, found = json.loads(answer)
    if kind != "ok":
        raise ConfigError(found) if kind == "config" else RunError(found)
    return [
        Failure(first, second) if isinstance(first, str) else Score(first, second)
        for first, second in found
    ]
