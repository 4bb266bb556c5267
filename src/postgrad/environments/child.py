"""The main program of a pool's child process: runs sessions in threads, and replies.

Messages are JSON. In: {"key", "operation"}, which is null at a session's end; with "made", the
session is made first: spec, problem, seed, and the operations so far. Out: [key, kind, fields] per
operation, in any order. Imports no torch.
"""

import json
import os
import threading
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.host import Result, ThreadHost, attempt
from postgrad.environments.port import Observation, Outcome
from postgrad.environments.session import Operation, Session, SessionSpec
from postgrad.problem import Failure, problem_from
from postgrad.processes.channel import Channel, to_json
from postgrad.processes.program import run_child

RESULTS: dict[str, type] = {kind.__name__: kind for kind in (Observation, Outcome, Failure)}


def main(channel: Channel) -> None:
    executor = ThreadHost().executor
    sessions: dict[int, Session] = {}
    sending = threading.Lock()

    def run(message: dict[str, Any]) -> None:
        key = message["key"]
        result = attempt(lambda: _run(sessions, message))
        with sending:
            channel.send(to_json([key, *encode_result(result)]))

    while (data := channel.receive()) is not None:
        message = json.loads(data)
        if message["operation"] is not None:
            executor.submit(run, message)
        elif message["key"] in sessions:
            executor.submit(sessions.pop(message["key"]).close)
    os._exit(0)  # the parent closed the channel; threads of environments may hang


def _run(sessions: dict[int, Session], message: dict[str, Any]) -> Result:
    key = message["key"]
    if made := message.get("made"):
        spec = SessionSpec(**made["spec"])
        sessions[key] = Session(spec, problem_from(made["problem"]), made["seed"])
        for operation in made["history"]:
            sessions[key].run(_operation(operation))
    return sessions[key].run(_operation(message["operation"]))


def _operation(fields: dict[str, Any]) -> Operation:
    calls = tuple(Call(**call) for call in fields["calls"])
    return Operation(fields["kind"], fields["action"], calls)


def encode_result(result: Result) -> tuple[str, Any]:
    """Return a result as the name of its type and its fields."""
    return type(result).__name__, vars(result)


def decode_result(kind: str, fields: Any) -> Result:
    """Return the result that encode_result was given."""
    return RESULTS[kind](**fields)


if __name__ == "__main__":
    run_child(main)
