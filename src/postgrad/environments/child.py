"""The main program of a pool's child process: runs sessions in threads, and replies.

Messages are JSON lines over one socket.

- In: {"op": open | act | finish | close, "key": ..., and the operation's arguments}. With
  "replay", the session is first made again: spec, problem, seed and the turns so far.
- Out: ["ready"] once, then [key, kind, fields] per operation, in any order.

Imports no torch.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.host import MAX_THREADS, Result, ThreadHost, attempt
from postgrad.environments.port import Observation, Outcome
from postgrad.environments.session import SessionSpec
from postgrad.problem import Failure
from postgrad.verifiers.child import decode_problem, encode, exit_with_parent

RESULTS: dict[str, type] = {kind.__name__: kind for kind in (Observation, Outcome, Failure)}


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    # A scheduler may send SIGTERM to all processes of a run. The parent handles it and kills us.
    signal.signal(signal.SIGTERM, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sessions = ThreadHost(MAX_THREADS).new_sessions()
    replier = threading.Thread(target=_send_replies, args=(sessions, channel), daemon=True)
    replier.start()
    channel.sendall(encode(["ready"]))
    for line in channel.makefile("rb"):
        message = json.loads(line)
        if message["op"] == "close":
            sessions.close(message["key"])
        else:
            sessions.executor.submit(_run, sessions, message)
    os._exit(0)  # the parent closed the socket; threads of environments may hang


def _run(sessions: Any, message: dict[str, Any]) -> None:
    """Run one operation; its result goes to the queue of replies."""
    key = message["key"]

    def operation() -> Any:
        if "replay" in message:
            made = message["replay"]
            history = [(action, decode_calls(calls)) for action, calls in made["history"]]
            spec = SessionSpec(**made["spec"])
            problem = decode_problem(made["problem"])
            if message["op"] == "open":
                return sessions.new(key, spec, problem, made["seed"]).open()
            sessions.replay(key, spec, problem, made["seed"], history)
        session = sessions.sessions[key]
        if message["op"] == "act":
            return session.act(message["action"], decode_calls(message["calls"]))
        return session.finish()

    sessions.replies.put((key, attempt(operation)))


def _send_replies(sessions: Any, channel: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        while True:
            for key, result in sessions.collect(timeout_s=60.0):
                channel.sendall(encode([key, *encode_result(result)]))


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
    with contextlib.suppress(ConnectionError):  # the parent was killed
        main()
