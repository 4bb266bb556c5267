"""Engines that are servers: anything with OpenAI's /v1/completions (vLLM, SGLang, postgrad serve).

Encoder are sent as token ids and return as token ids with log-probs where the server supports it; a
server that refuses ids gets text. http_client.py makes the calls.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from postgrad.errors import RunError
from postgrad.problem import Failure
from postgrad.rollout.engine import Completion, Request, Sampling, max_row_tokens, token_limit
from postgrad.rollout.http_client import Address, ModelClient, RequestRefused, json_objects

TOKEN_ID_PREFIX = "token_id:"


class Tokenizer(Protocol):
    """Text to token ids and back, for the model behind a server."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...


class HttpEngine:
    """The engine port over a server with fixed weights.

    Log-probs are the server's (vLLM's are at temperature 1 unless it was started with
    --logprobs-mode processed_logprobs); empty when the server gives none.
    """

    shares_weights = False
    Client: ClassVar[type[ModelClient]] = ModelClient

    def __init__(
        self, address: Address, tokenizer: Tokenizer, wait_s: float = 600.0, concurrency: int = 32
    ) -> None:
        self.client = self.Client(address, wait_s, concurrency)
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
        return self._parse_completion(only_choice(answer, self.url))

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
        self.client = ModelClient(address, wait_s, concurrency)
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
            message = only_choice(answer, address.url).get("message") or {}
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


def only_choice(answer: Any, url: str) -> dict[str, Any]:
    """Return the choice of an answer to a request for one. Raises RunError."""
    choices = json_objects(answer, "choices")
    if len(choices) != 1 or choices[0].get("index", 0) != 0:
        raise RunError(f"{url} answered with {len(choices)} choices to a request for one")
    return choices[0]
