"""The main program of a pool's child process: runs sessions in threads, and replies.

Messages are JSON.

- In: {"op": open | act | finish | close, "key": ..., and the operation's arguments}. With
  "replay", the session is first made again: spec, problem, seed and the turns so far.
- Out: [key, kind, fields] per operation, in any order.

Imports no torch.
"""

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.host import MAX_THREADS, Result, ThreadHost, attempt
from postgrad.environments.port import Observation, Outcome
from postgrad.environments.session import SessionSpec
from postgrad.problem import Failure, problem_from
from postgrad.processes.channel import Channel, to_json
from postgrad.processes.program import run_child

RESULTS: dict[str, type] = {kind.__name__: kind for kind in (Observation, Outcome, Failure)}


def main(channel: Channel) -> None:
    sessions = ThreadHost(MAX_THREADS).new_sessions()
    replier = threading.Thread(target=_send_replies, args=(sessions, channel), daemon=True)
    replier.start()
    while (data := channel.receive()) is not None:
        message = json.loads(data)
        if message["op"] == "close":
            sessions.close(message["key"])
        else:
            sessions.executor.submit(_run, sessions, message)
    os._exit(0)  # the parent closed the channel; threads of environments may hang


def _run(sessions: Any, message: dict[str, Any]) -> None:
    """Run one operation; its result goes to the queue of replies."""
    key = message["key"]

    def operation() -> Any:
        if "replay" in message:
            made = message["replay"]
            history = [(action, decode_calls(calls)) for action, calls in made["history"]]
            spec = SessionSpec(**made["spec"])
            problem = problem_from(made["problem"])
            if message["op"] == "open":
                return sessions.new(key, spec, problem, made["seed"]).open()
            sessions.replay(key, spec, problem, made["seed"], history)
        session = sessions.sessions[key]
        if message["op"] == "act":
            return session.act(message["action"], decode_calls(message["calls"]))
        return session.finish()

    sessions.replies.put((key, attempt(operation)))


def _send_replies(sessions: Any, channel: Channel) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        while True:
            for key, result in sessions.collect(timeout_s=60.0):
                channel.send(to_json([key, *encode_result(result)]))


def encode_result(result: Result) -> tuple[str, Any]:
    """Return a result as the name of its type and its fields."""
    if isinstance(result, str):
        return "text", result
    return type(result).__name__, vars(result)


def decode_result(kind: str, fields: Any) -> Result:
    """Return the result that encode_result was given."""
    return fields if kind == "text" else RESULTS[kind](**fields)


def decode_calls(calls: Sequence[dict[str, Any]]) -> list[Call]:
    return [Call(**call) for call in calls]


if __name__ == "__main__":
    run_child(main)
