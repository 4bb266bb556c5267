"""Verifiers in child processes: every response gets a Score or a Failure, whatever a verifier does.

The time limit, the replacement of children and the blame for a crash are processes/supervisor.py's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from postgrad import phases
from postgrad.machine import available_cores
from postgrad.problem import Failure, Problem, Score, sent_fields
from postgrad.processes.supervisor import Ended, Supervisor
from postgrad.verifiers.loading import find_verifier, load_verifier
from postgrad.verifiers.port import run_verifier
from postgrad.verifiers.table import VerifierSpec

MEMORY_BYTES = 2 << 30  # address space of a verifier beyond what its imports took
OWN_WORKERS = 2  # for the user's functions, which may need much memory or a service
MAX_WORKERS = 16
# A hash seed, so that verdicts do not depend on the order of a set.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def default_workers(specs: Sequence[VerifierSpec]) -> int:
    """Return how many child processes score with these verifiers if the user does not say it."""
    if any(spec.is_own for spec in specs):
        return OWN_WORKERS
    return max(OWN_WORKERS, min(MAX_WORKERS, available_cores() - 1))


class VerifierPool:
    """Scores responses in `workers` child processes; 0: see `default_workers`.

    Each response has `timeout_s` seconds from the moment when a child starts on it, or more if its
    verifier has a time limit of its own (code). Children start when they are first needed. Use the
    pool as a context manager, or call close(). Calls from several threads take turns.
    """

    def __init__(self, workers: int = 0, timeout_s: float = 5.0) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        arguments = [timeout_s, MEMORY_BYTES]
        module = "postgrad.verifiers.child"
        self.processes = Supervisor(module, arguments, "verifier", ENVIRONMENT)
        self._specs: dict[str, VerifierSpec] = {}

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children and wait for them, at most a few seconds. Ends the use of the pool."""
        self.processes.close()

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]:
        """Return one Score or Failure per (response, problem), in order.

        verifier_names[i] is the verifier of items[i]. The kinds of Failure are timeout, crash (also
        out of memory), error (the verifier raised) and invalid (it returned no finite number).

        Raises:
            ConfigError: there is no such verifier.
            RunError: child processes do not start.
        """
        for name in set(verifier_names) - set(self._specs):
            self._specs[name] = find_verifier(name)
        specs = [self._specs[name] for name in verifier_names]
        results: dict[int, Score | Failure] = {}
        for position, spec in enumerate(specs):
            if spec.inline:
                verifier = partial(load_verifier(spec.path), **spec.arguments)
                results[position] = run_verifier(verifier, *items[position])
        num_inline = len(results)
        sent = [position for position, spec in enumerate(specs) if not spec.inline]
        if sent:
            outcomes = self.processes.run(
                len(sent),
                self.workers or default_workers(specs),
                lambda chunk: _pack([(i, specs[sent[i]], *items[sent[i]]) for i in chunk]),
                lambda item: max(self.timeout_s, specs[sent[item]].time_limit_s),
                lambda num_done: phases.count(num_inline + num_done, len(items)),
            )
            for position, outcome in zip(sent, outcomes, strict=True):
                results[position] = _verdict(outcome)
        return [results[position] for position in range(len(items))]


def _pack(items: Sequence[tuple[int, VerifierSpec, str, Problem]]) -> dict[str, Any]:
    """Return the message for these items; a problem that several of them share is sent once."""
    problems: list[Problem] = []
    indices: dict[int, int] = {}
    rows = []
    for item, spec, response, problem in items:
        if id(problem) not in indices:
            indices[id(problem)] = len(problems)
            problems.append(problem)
        rows.append(
            [item, spec.path, spec.arguments, indices[id(problem)], response, spec.time_limit_s]
        )
    return {"problems": [sent_fields(problem) for problem in problems], "items": rows}


def _verdict(outcome: list[Any] | Ended) -> Score | Failure:
    """Return what the child's answer means, or the Failure of an item that ended its child."""
    match outcome:
        case ["score", value, parts]:
            return Score(value, parts)
        case [kind, reason]:
            return Failure(kind, reason)
        case Ended(late=True, paused_for=module, limit_s=limit_s) if module:
            return Failure("timeout", f"import {module} took over {limit_s:g} s")
        case Ended(late=True, limit_s=limit_s):
            return Failure("timeout", f"no score within {limit_s:g} s")
        case Ended(how=how):
            return Failure("crash", f"the verifier's process ended: {how}")
    raise AssertionError(outcome)
