"""Engines that are servers: anything with OpenAI's /v1/completions (vLLM, SGLang, postgrad serve).

Prompts are sent as token ids and return as token ids with log-probs where the server supports it; a
server that refuses ids gets text. Every call has a total time limit and is retried within it, with
growing pauses. Errors name the address and the last failure. The environment variable
POSTGRAD_API_KEY has the key for servers that require one.
"""

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
from torch import Tensor

from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.problem import Failure
from postgrad.rollout.engine import Completion, Request, Sampling, max_row_tokens, token_limit

START_S = 10.0  # time limit for the first answer of a server
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries; the last one repeats
RETRY_STATUSES = (408, 409, 425, 429)  # and all from 500 on
MAX_RESPONSE_BYTES = 64 << 20
TOKEN_ID_PREFIX = "token_id:"
Item = TypeVar("Item")
Result = TypeVar("Result")


class RequestRefused(Exception):
    """The server answered with an error that a retry cannot change; `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _NotStarted(RunError):
    """A call that was not made because another call of the same batch had failed."""


class Tokenizer(Protocol):
    """Text to token ids and back, for the model behind a server."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Address:
    """A server and one of its models, written http://host:port/v1#model."""

    url: str  # scheme, host, port and path, without a slash at the end
    model: str

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse http://host:port/v1#model. Raises ConfigError."""
        parts = urlsplit(text)
        try:
            _ = parts.port
            has_valid_port = True
        except ValueError:
            has_valid_port = False
        is_http = parts.scheme in ("http", "https")
        if not (is_http and parts.hostname and has_valid_port and parts.fragment):
            raise ConfigError(
                f"{text} is not a model behind a server; write it as http://host:8000/v1#model"
            )
        return Address(f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), parts.fragment)


class HttpClient:
    """JSON calls to one server, with retries, time limits and reused connections. Thread-safe.

    Args:
        address: the server and its model.
        wait_s: time limit per call of `map` in seconds.
        concurrency: largest number of calls at the same time.
    """

    def __init__(self, address: Address, wait_s: float, concurrency: int) -> None:
        self.address = address
        self.wait_s = wait_s
        self.concurrency = concurrency
        is_https = address.url.startswith("https:")
        self._http = httpx.Client(
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            verify=ssl.create_default_context() if is_https else False,
            trust_env=False,  # a proxy would time out before a generation ends
        )

    def check(self) -> int | None:
        """Check that the server answers and has the model; returns its context length if known.

        Raises ConfigError.
        """
        deadline = time.monotonic() + min(START_S, self.wait_s)
        try:
            answer = self.call("GET", "/models", None, deadline)
        except (RunError, RequestRefused) as error:
            reason = str(error)
            if isinstance(error, RequestRefused):
                reason = f"answers {error.status}: {error}"
            raise ConfigError(
                f"{self.address.url} {reason}; start the server there, or give another address"
            ) from error
        models = {str(entry.get("id")): entry for entry in _entries(answer, "data")}
        if models and self.address.model not in models:
            raise ConfigError(
                f"{self.address.url} has no model {self.address.model}; "
                f"{did_you_mean(self.address.model, models)}"
            )
        length = models.get(self.address.model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def map(
        self, function: Callable[[Item, float], Result], items: Sequence[Item], what: str
    ) -> list[Result]:
        """Return function(item, deadline) of every item, in order, in `concurrency` threads.

        After the first error no further call starts, and that error is raised. `what` names one
        call in error messages.
        """
        deadline = time.monotonic() + self.wait_s
        failed = threading.Event()

        def run(item: Item) -> Result:
            if failed.is_set():
                raise _NotStarted(f"{self.address.url}: {what} was not started")
            try:
                return function(item, deadline)
            except BaseException:
                failed.set()
                raise

        num_threads = max(1, min(self.concurrency, len(items)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="http") as pool:
            futures = [pool.submit(run, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _NotStarted):
                raise error
        return [future.result() for future in futures]

    def call(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> Any:
        """Return the JSON answer of one call; retry while the server is down or busy.

        Raises:
            RequestRefused: the server answered with an error status.
            RunError: no answer by the deadline; names the address, the call and the last failure.
        """
        start = time.monotonic()
        num_tries = 0
        failure = "no try was made"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                status, answer = self._send(method, path, body, left_s)
                if status < 400:
                    return answer
                reason = _error_message(answer)
                if status < 500 and status not in RETRY_STATUSES:
                    raise RequestRefused(status, reason)
                failure = f"status {status}: {reason}"
            except (httpx.HTTPError, OSError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}".removesuffix(": ")
            pause_s = PAUSES_S[min(num_tries, len(PAUSES_S) - 1)]
            num_tries += 1
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        waited_s = time.monotonic() - start
        raise RunError(
            f"did not answer {method} {self.address.url}{path} within {waited_s:.0f} s "
            f"and {num_tries} tries (the last: {failure})"
        )

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, left_s: float
    ) -> tuple[int, Any]:
        """Send one request and return its status and JSON body (a text for errors without JSON).

        Raises httpx.HTTPError, OSError or ValueError when there is no usable answer in `left_s`.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get("POSTGRAD_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + left_s
        raw = bytearray()
        with self._http.stream(
            method, self.address.url + path, content=content, headers=headers, timeout=left_s
        ) as response:
            for part in response.iter_bytes():
                raw += part
                if len(raw) > MAX_RESPONSE_BYTES:
                    raise ValueError(f"an answer of more than {MAX_RESPONSE_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("timed out")
        try:
            return response.status_code, json.loads(raw)
        except ValueError:
            if response.status_code >= 400:
                return response.status_code, raw.decode(errors="replace")
            raise ValueError(f"an answer that is not JSON: {bytes(raw[:80])!r}") from None


class HttpEngine:
    """The engine port over a server with fixed weights.

    Log-probs are the server's (vLLM's are at temperature 1 unless it was started with
    --logprobs-mode processed_logprobs); empty when the server gives none.
    """

    shares_weights = False

    def __init__(
        self, address: Address, tokenizer: Tokenizer, wait_s: float = 600.0, concurrency: int = 32
    ) -> None:
        self.client = HttpClient(address, wait_s, concurrency)
        self.tokenizer = tokenizer
        self.max_context = self.client.check()
        self.takes_ids = True
        self.extra_fields: dict[str, Any] = {}  # of every call with token ids

    @property
    def url(self) -> str:
        return self.client.address.url

    @property
    def model(self) -> str:
        return self.client.address.model

    def publish(self, weights: dict[str, Tensor]) -> None:
        raise RunError(
            f"{self.url} cannot take new weights; use it for models that are not trained"
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Make one call per seed; the completions are in the order of the requests and seeds."""
        self._check_context(requests, sampling)
        calls = [(request, seed) for request in requests for seed in request.seeds]

        def complete(call: tuple[Request, int], deadline: float) -> Completion:
            request, seed = call
            return self._complete(request, seed, sampling, deadline)

        completions = iter(self.client.map(complete, calls, "a completion"))
        return [[next(completions) for _ in request.seeds] for request in requests]

    def _check_context(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self.max_context is None:
            return
        for request in requests:
            if max_row_tokens(request, sampling) > self.max_context:
                raise RunError(
                    f"a prompt of {len(request.prompt)} tokens and "
                    f"{token_limit(request, sampling)} new ones exceed the context of "
                    f"{self.max_context} at {self.url}; lower the number of new tokens"
                )

    def _complete(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        """Complete with token ids; with text if the server refuses ids, also in later calls."""
        refusals: list[str] = []
        for with_ids in (True, False) if self.takes_ids else (False,):
            try:
                completion = self._post(request, seed, sampling, deadline, with_ids)
            except RequestRefused as error:
                refusals.append(f"{error.status}: {error}")
                if error.status not in (400, 422):
                    break
                continue
            if not with_ids:
                self.takes_ids = False
            return completion
        raise RunError(
            f"{self.url} refused a completion of model {self.model} with "
            + "; then, as text, ".join(refusals)
        )

    def _post(
        self, request: Request, seed: int, sampling: Sampling, deadline: float, with_ids: bool
    ) -> Completion:
        body = _sampling_fields(self.model, sampling, seed, token_limit(request, sampling))
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        if with_ids:  # fields of vLLM and SGLang beyond OpenAI's
            body |= {
                "prompt": list(request.prompt),
                "logprobs": 0,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
                **self.extra_fields,
            }
        else:
            if sampling.top_k or sampling.min_p or sampling.stop:
                raise RunError(
                    f"{self.url} takes text only, so top_k, min_p and stop strings cannot be used "
                    "with it; remove them, or use another server"
                )
            body["prompt"] = self.tokenizer.decode_raw(request.prompt)
        answer = self.client.call("POST", "/completions", body, deadline)
        return self._parse_completion(_only_choice(answer, self.url))

    def _parse_completion(self, choice: dict[str, Any]) -> Completion:
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        logprobs = choice.get("logprobs") or {}
        ids = choice.get("token_ids") or _ids_from_names(logprobs.get("tokens") or [])
        if not ids:
            text = str(choice.get("text", ""))
            tokens = self.tokenizer.encode_response(text, with_end=finish == "stop")
            return Completion(tokens, [], finish)
        values = [float(value) for value in logprobs.get("token_logprobs") or []]
        if len(values) != len(ids):
            values = []
        return Completion([int(i) for i in ids], values, finish)


class HttpChat:
    """A model that answers messages through a server's /chat/completions, such as a judge.

    It needs no tokenizer in this process.
    """

    def __init__(self, address: Address, wait_s: float = 600.0, concurrency: int = 16) -> None:
        self.client = HttpClient(address, wait_s, concurrency)
        self.client.check()

    def reply(
        self, chats: Sequence[list[dict[str, str]]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]:
        """Return the answer to each list of messages; a Failure for one that the server refuses."""
        address = self.client.address

        def answer_one(item: tuple[list[dict[str, str]], int], deadline: float) -> str | Failure:
            messages, seed = item
            body = _sampling_fields(address.model, sampling, seed, sampling.max_new_tokens)
            body["messages"] = messages
            try:
                answer = self.client.call("POST", "/chat/completions", body, deadline)
            except RequestRefused as error:
                return Failure("judge", f"{address.url} answered {error.status}: {error}")
            message = _only_choice(answer, address.url).get("message") or {}
            return str(message.get("content") or "")

        return self.client.map(answer_one, list(zip(chats, seeds, strict=True)), "a chat")


def _sampling_fields(model: str, sampling: Sampling, seed: int, limit: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "seed": seed - 2**64 if seed >= 2**63 else seed,  # servers read signed 64-bit numbers
    }


def _ids_from_names(names: list[Any]) -> list[int]:
    """Return token ids from names such as token_id:7; [] if a name has another form."""
    texts = [str(name) for name in names]
    if not all(text.startswith(TOKEN_ID_PREFIX) for text in texts):
        return []
    return [int(text.removeprefix(TOKEN_ID_PREFIX)) for text in texts]


def _only_choice(answer: Any, url: str) -> dict[str, Any]:
    choices = _entries(answer, "choices")
    if len(choices) != 1 or choices[0].get("index", 0) != 0:
        raise RunError(f"{url} answered with {len(choices)} choices to a request for one")
    return choices[0]


def _entries(answer: Any, name: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the list `name` of an answer; [] if there is no such list."""
    entries = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def _error_message(answer: Any) -> str:
    """Return the message of an error's body in any of the usual shapes, in one line."""
    while isinstance(answer, dict):
        for key in ("error", "message", "detail"):
            if answer.get(key):
                answer = answer[key]
                break
        else:
            answer = json.dumps(answer)
    return " ".join(str(answer).split())[:300]
