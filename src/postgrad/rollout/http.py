"""Engines that are servers: anything that answers OpenAI's /v1/completions, such as vLLM, SGLang or `postgrad serve`.

Prompts go out as token ids and come back as token ids with their log-probs where the server can do that; one that refuses ids gets text.
Every call has a total time limit, retries with growing pauses within it, and an error that names the address and what was waited for.
A key for servers that want one is read from POSTGRAD_API_KEY.
"""

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from torch import Tensor

from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.problem import Failure
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit

START_S = 10.0  # for a server to say that it is there
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries; the last one repeats
BUSY = (408, 409, 425, 429)  # answers that ask for another try, as do all from 500 on
MAX_ANSWER_BYTES = 64 << 20
T = TypeVar("T")
R = TypeVar("R")


class RequestRefused(Exception):
    """The server understood the call and said no; `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _GivenUp(RunError):
    """Not tried, because another call of the same kind had failed."""


class Text(Protocol):
    """The tokenizer's side of a model behind a server."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Address:
    """Where a server is and which of its models is meant: http://host:port/v1#model."""

    url: str  # scheme, host, port and path, no slash at the end
    model: str

    @staticmethod
    def parse(text: str) -> "Address":
        """Raises ConfigError for what is not such an address."""
        parts = urlsplit(text)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port == -1
            or not parts.fragment
        ):
            raise ConfigError(
                f"{text} is not a model behind a server; write it as http://host:8000/v1#model"
            )
        return Address(f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), parts.fragment)


class HttpClient:
    """One server: calls that end, and at most `concurrency` of them at a time."""

    def __init__(self, address: Address, wait_s: float, concurrency: int) -> None:
        self.address, self.wait_s, self.concurrency = address, wait_s, concurrency
        self._local = threading.local()
        self._opened: list[http.client.HTTPConnection] = []

    def check(self) -> int | None:
        """See that it is there and has the model; its context length where it tells. Raises ConfigError."""
        try:
            answer = self.call("GET", "/models", None, time.monotonic() + min(START_S, self.wait_s))
        except (RunError, RequestRefused) as error:
            reason = (
                f"answers {error.status}: {error}"
                if isinstance(error, RequestRefused)
                else str(error)
            )
            raise ConfigError(
                f"{self.address.url} {reason}; start the server there, or give another address"
            ) from error
        finally:
            self._drop()
        models = {str(m.get("id")): m for m in _entries(answer, "data")}
        if models and self.address.model not in models:
            raise ConfigError(
                f"{self.address.url} has no model {self.address.model}; {did_you_mean(self.address.model, models)}"
            )
        length = models.get(self.address.model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def each(self, function: Callable[[T, float], R], items: Sequence[T], what: str) -> list[R]:
        """function(item, deadline) of every item, in order; once one raises, those that have not begun are left."""
        deadline = time.monotonic() + self.wait_s
        stop = threading.Event()

        def one(item: T) -> R:
            if stop.is_set():
                raise _GivenUp(f"{self.address.url}: {what} was given up")
            try:
                return function(item, deadline)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(
            max(1, min(self.concurrency, len(items))), thread_name_prefix="http"
        ) as pool:
            futures = [pool.submit(one, item) for item in items]
        while self._opened:
            self._opened.pop().close()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _GivenUp)), errors[0])
        return [future.result() for future in futures]

    def call(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> Any:
        """One call, tried again until the deadline while the server is away or busy.

        Raises:
            Refused: the server answered that it will not.
            RunError: no answer by the deadline; names the address, the call and the last trouble.
        """
        began, tries, trouble = time.monotonic(), 0, "no try was made"
        while (left := deadline - time.monotonic()) > 0:
            try:
                status, answer = self._once(method, path, body, left)
                if status < 400:
                    return answer
                trouble = f"status {status}: {_reason(answer)}"
                if status < 500 and status not in BUSY:
                    raise RequestRefused(status, _reason(answer))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._drop()
                trouble = f"{type(error).__name__}: {error}".removesuffix(": ")
            pause = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
            tries += 1
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        waited = time.monotonic() - began
        raise RunError(
            f"did not answer {method} {self.address.url}{path} within {waited:.0f} s and {tries} tries (the last: {trouble})"
        )

    def _once(
        self, method: str, path: str, body: dict[str, Any] | None, left_s: float
    ) -> tuple[int, Any]:
        connection = self._connection(left_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get("POSTGRAD_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, urlsplit(self.address.url).path + path, data, headers)
        response = connection.getresponse()
        raw = response.read(MAX_ANSWER_BYTES)
        if response.will_close or not response.isclosed():
            self._drop()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            if response.status >= 400:
                return response.status, raw.decode(errors="replace")
            raise ValueError(f"an answer that is not JSON: {raw[:80]!r}") from None

    def _connection(self, left_s: float) -> http.client.HTTPConnection:
        """This thread's connection, opened when there is none; each wait on it is bounded by what is left."""
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            parts = urlsplit(self.address.url)
            kind = (
                http.client.HTTPSConnection
                if parts.scheme == "https"
                else http.client.HTTPConnection
            )
            found = self._local.connection = kind(parts.hostname or "", parts.port, timeout=left_s)
            self._opened.append(found)
        found.timeout = left_s
        if found.sock is not None:
            found.sock.settimeout(left_s)
        return found

    def _drop(self) -> None:
        if (found := getattr(self._local, "connection", None)) is not None:
            found.close()
            self._local.connection = None


class HttpEngine:
    """The engine port over a server. It samples from weights of its own, which cannot be replaced from here.

    Log-probs are the server's (those of vLLM are at temperature 1 unless it is told otherwise); empty where it gives none.
    """

    shares_weights = False

    def __init__(
        self, address: Address, text: Text, wait_s: float = 600.0, concurrency: int = 32
    ) -> None:
        self.server, self.text = HttpClient(address, wait_s, concurrency), text
        self.max_context = self.server.check()
        self.takes_ids = True
        self.more: dict[str, Any] = {}  # goes with every call by token ids

    def publish(self, weights: dict[str, Tensor]) -> None:
        raise RunError(
            f"{self.server.address.url} cannot take new weights; use a server for models that stay as they are"
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One call for each seed, so that every continuation has its own; the order is that of the requests."""
        for request in requests:
            if (
                self.max_context is not None
                and len(request.prompt) + token_limit(request, sampling) > self.max_context
            ):
                raise RunError(
                    f"a prompt of {len(request.prompt)} tokens and {token_limit(request, sampling)} new ones exceed the context of "
                    f"{self.max_context} at {self.server.address.url}; lower the number of new tokens"
                )
        calls = [(request, seed) for request in requests for seed in request.seeds]
        done = iter(
            self.server.each(
                lambda call, deadline: self._continue(call[0], call[1], sampling, deadline),
                calls,
                "a generation",
            )
        )
        return [[next(done) for _ in request.seeds] for request in requests]

    def _continue(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        """By token ids first; a server that refuses those gets text, then and from then on."""
        refusals: list[RequestRefused] = []
        for as_ids in (True, False) if self.takes_ids else (False,):
            try:
                done = self._ask(request, seed, sampling, deadline, as_ids)
            except RequestRefused as error:
                refusals.append(error)
                if error.status not in (400, 422):
                    break
                continue
            if not as_ids:
                self.takes_ids = False
            return done
        said = "; then, as text, ".join(f"{error.status}: {error}" for error in refusals)
        raise RunError(
            f"{self.server.address.url} refused a completion of model {self.server.address.model} with {said}"
        )

    def _ask(
        self, request: Request, seed: int, sampling: Sampling, deadline: float, as_ids: bool
    ) -> Completion:
        body = _sampling_body(
            self.server.address.model, sampling, seed, token_limit(request, sampling)
        )
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        if as_ids:  # the names of vLLM and SGLang beyond OpenAI's
            filters = {"top_k": sampling.top_k or -1, "min_p": sampling.min_p}
            ids = {
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
            }
            body |= {"prompt": list(request.prompt), "logprobs": 0, **filters, **ids, **self.more}
        else:
            if sampling.top_k or sampling.min_p or sampling.stop:
                raise RunError(
                    f"{self.server.address.url} takes text only, and has no top_k, min_p or stop that keeps tokens; remove them"
                )
            body["prompt"] = self.text.decode_raw(request.prompt)
        choice = _choice(
            self.server.call("POST", "/completions", body, deadline), self.server.address.url
        )
        return self._completion(choice)

    def _completion(self, choice: dict[str, Any]) -> Completion:
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        logprobs = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if not ids:
            named = [str(token) for token in logprobs.get("tokens") or []]
            ids = (
                [int(n[9:]) for n in named]
                if named and all(n.startswith("token_id:") for n in named)
                else None
            )
        if not ids:
            return Completion(
                self.text.encode_response(str(choice.get("text", "")), with_end=finish == "stop"),
                [],
                finish,
            )
        values = [float(value) for value in logprobs.get("token_logprobs") or []]
        return Completion([int(i) for i in ids], values if len(values) == len(ids) else [], finish)


class HttpChat:
    """A model that answers messages through a server's /chat/completions: for judges, whose tokenizer nobody needs here."""

    def __init__(self, address: Address, wait_s: float = 600.0, concurrency: int = 16) -> None:
        self.server = HttpClient(address, wait_s, concurrency)
        self.server.check()

    def reply(
        self, chats: Sequence[list[dict[str, str]]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]:
        """The answer to each list of messages; a Failure for one that the server refuses."""

        def one(item: tuple[list[dict[str, str]], int], deadline: float) -> str | Failure:
            body = _sampling_body(
                self.server.address.model, sampling, item[1], sampling.max_new_tokens
            )
            try:
                answer = self.server.call(
                    "POST", "/chat/completions", body | {"messages": item[0]}, deadline
                )
            except RequestRefused as error:
                return Failure(
                    "judge", f"{self.server.address.url} answered {error.status}: {error}"
                )
            message = _choice(answer, self.server.address.url).get("message") or {}
            return str(message.get("content") or "")

        return self.server.each(one, list(zip(chats, seeds, strict=True)), "a chat")


def _sampling_body(model: str, sampling: Sampling, seed: int, limit: int) -> dict[str, Any]:
    common = {
        "model": model,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    return common | {
        "n": 1,
        "seed": seed - 2**64 if seed >= 2**63 else seed,
    }  # servers keep seeds in 64 bits with a sign


def _choice(answer: Any, url: str) -> dict[str, Any]:
    choices = _entries(answer, "choices")
    found = [choice for choice in choices if choice.get("index", 0) == 0]
    if len(found) != 1 or len(choices) != 1:
        raise RunError(f"{url} answered with {len(choices)} choices where one was asked for")
    return found[0]


def _entries(answer: Any, name: str) -> list[dict[str, Any]]:
    found = answer.get(name) if isinstance(answer, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _reason(answer: Any) -> str:
    """The words in an error's body, whichever of the usual shapes it has."""
    while isinstance(answer, dict):
        answer = next(
            (answer[key] for key in ("error", "message", "detail") if answer.get(key)),
            json.dumps(answer),
        )
    return " ".join(str(answer).split())[:300]
