"""Environments behind a server: the client of OpenEnv's wire, without the openenv package.

A trajectory is one WebSocket connection to URL/ws. Messages are JSON:

    {"type": "reset", "data": {seed, ...}}   -> {"type": "observation", "data": STEP}
    {"type": "step", "data": ACTION}         -> {"type": "observation", "data": STEP}
    {"type": "state"}                        -> {"type": "state", "data": {...}}
    what cannot be done                      -> {"type": "error", "data": {message, code}}

STEP is {"observation": {...}, "reward": number or null, "done": bool}. GET URL/schema describes
actions and observations.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from functools import cache
from typing import Any

from postgrad.environments.calls import parse_json
from postgrad.environments.port import EnvironmentFailure
from postgrad.errors import Damaged, NotInstalled, UnknownName, Unreachable, did_you_mean
from postgrad.problem import Problem, sent_fields
from postgrad.processes.channel import to_json
from postgrad.verifiers.port import one_line

SCHEMES = ("http://", "https://")
TOKEN_VARIABLE = "POSTGRAD_ENVIRONMENT_TOKEN"
SCHEMA_S = 20.0  # for the server to describe itself
MAX_MESSAGE = 64 << 20  # bytes; environment.max_chars cuts long observations afterwards
CAPACITY_WAIT_S = 0.2  # between two attempts at a server that is full
CLOSE_S = 1.0
PROTOCOL_FIELDS = ("metadata", "done", "reward")  # of actions and observations; never their text


class RemoteEnvironment:
    """One session of a server; see the port for what the methods do.

    Args:
        url: the server, http:// or https://.
        timeout_s: how long to wait for a server that is full.
        action_field: the field of an action that gets the policy's text. Default: the only field,
            or the only required one; without one, the policy writes the action as JSON.
        observation_field: the field of an observation that the policy sees. Default: the only
            field with text; without one, it sees all fields as JSON.
        reset: further arguments of the server's reset.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        action_field: str = "",
        observation_field: str = "",
        reset: dict[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.schema = fetch_schema(url)
        self.action_field = action_field or find_action_field(self.schema)
        self.observation_field = observation_field
        self.reset_arguments = dict(reset or {})
        self.connection: Any = None
        self.closing = contextlib.ExitStack()
        self.closed = threading.Event()

    def reset(self, problem: Problem, seed: int) -> str:
        """Return the text of the first observation.

        The server's seed depends on the problem only, so that all trajectories of a problem begin
        in the same state. `problem` and `trajectory_seed` are for servers that take them.
        """
        arguments = {
            "seed": problem_seed(problem),
            "episode_id": problem.uid,
            "problem": sent_fields(problem),
            "trajectory_seed": seed,
            **self.reset_arguments,
        }
        return self._text(self._open({"type": "reset", "data": arguments})["observation"])

    def step(self, action: str) -> tuple[str, Any, bool]:
        fields = self._action(action)
        if fields is None:
            return f"error: reply with a JSON object with {self._action_names()}", 0.0, False
        answer = self._request({"type": "step", "data": fields})
        if _error_code(answer) == "VALIDATION_ERROR":  # the policy's mistake
            return f"error: {_error_text(answer)}", 0.0, False
        result = _read(answer, "observation")
        reward = result.get("reward")
        if reward is None:  # OpenEnv: the turn has no reward
            reward = 0.0
        return self._text(result["observation"]), reward, result.get("done") or False

    def get_state(self) -> Any:
        return _read(self._request({"type": "state"}), "state")

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(Exception):  # the server may be gone already
            if self.connection is not None:
                self.connection.send(json.dumps({"type": "close"}))
        with contextlib.suppress(Exception):
            self.closing.close()

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Connect and send the first message; waits while the server is full."""
        deadline = time.monotonic() + 0.8 * self.timeout_s  # before the session's own limit
        while not self.closed.is_set():
            self.connection = connect(self.url, self.timeout_s, self.closing)
            answer = self._request(message)
            if _error_code(answer) != "CAPACITY_REACHED":
                return _read(answer, "observation")
            self.closing.close()
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    "capacity",
                    f"{self.url} is full ({_error_text(answer)}); let it run more sessions at a "
                    "time (OpenEnv: max_concurrent_envs), or raise environment.timeout_s",
                )
            self.closed.wait(CAPACITY_WAIT_S)
        raise EnvironmentFailure("error", "the session was closed while it was opened")

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises EnvironmentFailure if it is gone or wrong."""
        try:
            # A server that is full answers and closes before it reads anything.
            with contextlib.suppress(ConnectionError, *_closed_errors()):
                self.connection.send(to_json(message).decode())
            answer = json.loads(self.connection.recv())
        except (OSError, ValueError, RecursionError, *_closed_errors()) as error:
            raise EnvironmentFailure(
                "connection", f"{self.url} broke off ({one_line(error)})"
            ) from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EnvironmentFailure("invalid", f"{self.url} sent no message of OpenEnv's protocol")
        return answer

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the fields of an action; None if the policy wrote none."""
        if self.action_field:
            kind = _fields(self.schema, "action").get(self.action_field, {}).get("type")
            return {self.action_field: text if kind == "string" else _as_json(text)}
        start, end = text.find("{"), text.rfind("}")
        found = _as_json(text[start : end + 1]) if 0 <= start < end else None
        return found if isinstance(found, dict) else None

    def _action_names(self) -> str:
        return ", ".join(_fields(self.schema, "action"))

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            raise EnvironmentFailure("invalid", f"{self.url} sent an observation without fields")
        if self.observation_field:
            return str(observation.get(self.observation_field, ""))
        fields = {key: value for key, value in observation.items() if key not in PROTOCOL_FIELDS}
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields)


def is_url(name: str) -> bool:
    return name.startswith(SCHEMES)


def problem_seed(problem: Problem) -> int:
    """Return a seed of 31 bits that depends on the problem only."""
    digest = hashlib.blake2b(problem.uid.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def connect(url: str, timeout_s: float, closing: contextlib.ExitStack) -> Any:
    """Return a new connection, which `closing` closes. Raises EnvironmentFailure."""
    from websockets.sync.client import connect as open_websocket

    try:
        websocket = open_websocket(
            f"ws{url.removeprefix('http').rstrip('/')}/ws",
            open_timeout=timeout_s,
            close_timeout=CLOSE_S,
            max_size=MAX_MESSAGE,
            compression=None,
            additional_headers=_headers(),
        )
        return closing.enter_context(websocket)
    except Exception as error:
        raise EnvironmentFailure("connection", f"{url}: {one_line(error)}") from error


@cache
def fetch_schema(url: str) -> dict[str, Any]:
    """Return the server's schema of actions and observations. Raises ConfigError."""
    from postgrad.net.client import HttpClient, NoAnswer, error_message

    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise NotInstalled(
            f"environment={url} needs the package websockets; pip install 'postgrad[openenv]'"
        ) from error
    client = HttpClient(url.rstrip("/"), os.environ.get(TOKEN_VARIABLE, ""), uses_proxy=True)
    now = time.monotonic()
    try:
        status, schema = client.send("GET", "/schema", None, now + SCHEMA_S, retry_until=now)
    except NoAnswer as error:
        status, schema = error.status, str(error)
    if status != 200:
        reason = f"{status or ''} {error_message(schema)}".strip()
        raise Unreachable(
            f"environment={url}: no server of OpenEnv's wire answers there ({reason}); "
            "start it first, or correct the address"
        )
    if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
        raise Damaged(f"environment={url}: its /schema does not describe actions")
    return schema


def check_remote(url: str, options: dict[str, Any]) -> None:
    """Ask the server for its schema, and check the fields that the options name.

    Raises ConfigError.
    """
    schema = fetch_schema(url)
    for kind in ("action", "observation"):
        name = options.get(f"{kind}_field", "")
        known = _fields(schema, kind)
        if name and known and name not in known:
            raise UnknownName(
                f"environment.options.{kind}_field={name}: {url} has no such field; "
                f"{did_you_mean(name, known)}"
            )


def find_action_field(schema: dict[str, Any]) -> str:
    """Return the only field of an action, or the only required one; "" without such a field."""
    fields = _fields(schema, "action")
    required = [name for name in schema["action"].get("required", []) if name in fields]
    if len(required) == 1:
        return required[0]
    return next(iter(fields)) if len(fields) == 1 else ""


def _fields(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    properties = (schema.get(kind) or {}).get("properties") or {}
    return {name: value for name, value in properties.items() if name not in PROTOCOL_FIELDS}


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE, "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _closed_errors() -> tuple[type[Exception], ...]:
    from websockets.exceptions import WebSocketException

    return (WebSocketException,)


def _as_json(text: str) -> Any:
    """Return the value of a JSON text, or the text itself."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _read(answer: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the data of an answer of this type. Raises EnvironmentFailure."""
    sent = answer.get("type")
    if sent == "error":
        raise EnvironmentFailure("error", _error_text(answer))
    if sent != kind:
        raise EnvironmentFailure("invalid", f"the server sent {sent}, not {kind}")
    return answer["data"]


def _error_code(answer: dict[str, Any]) -> str:
    return str(answer["data"].get("code", "")) if answer.get("type") == "error" else ""


def _error_text(answer: dict[str, Any]) -> str:
    data = answer["data"]
    details = [str(one.get("msg", "")) for one in data.get("errors") or [] if isinstance(one, dict)]
    return " ".join(" ".join([str(data.get("message", "")), *details]).split())[:500]
