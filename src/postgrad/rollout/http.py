"""Engines that are servers: anything with OpenAI's /v1/completions (vLLM, SGLang, postgrad serve).

Prompts are sent as token ids, and responses return as token ids with log-probs where the server
supports it; a server that refuses ids gets text. Prompts with pictures go to postgrad serve as ids
with pictures, to vLLM as a chat that must become the same ids. http_client.py makes the calls.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from postgrad.errors import RunError, Unsupported, first_line
from postgrad.pictures import Picture
from postgrad.problem import Failure
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    max_row_tokens,
    token_limit,
)
from postgrad.rollout.http_client import Address, ModelClient, RequestRefused, json_objects
from postgrad.rollout.http_sync import RELOAD_APIS, ReloadApi, ServerWeights

if TYPE_CHECKING:
    from postgrad.picture_processor import PictureProcessor

TOKEN_ID_PREFIX = "token_id:"
# Renders a chat of one message as its parts, with PLACE for each picture.
PARTS_TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}PLACE{% endif %}"
    "{% endfor %}{% endfor %}"
)


class Tokenizer(Protocol):
    """Text to token ids and back, for the model behind a server."""

    def decode_raw(self, ids: Sequence[int]) -> str: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...

    @property
    def picture_processor(self) -> "PictureProcessor": ...


class HttpEngine:
    """The engine port over a server: with fixed weights, or with those of a training run.

    Log-probs are the server's (vLLM's are at temperature 1 unless it was started with
    --logprobs-mode processed_logprobs); empty when a server with fixed weights gives none.

    Args:
        address: the server and its model.
        tokenizer: of the served model.
        wait_s: time limit per call in seconds.
        concurrency: largest number of calls at the same time.
        stop_ids: the model's stop tokens; a row of a training run that ends with another token is
            refused.
        weights_folder: where the weights of a training run are written; the server must see it
            under the same path. None: the weights are fixed.
        reads_pictures: the model may be shown pictures, whose features a server may keep.

    Raises:
        ConfigError: the server does not answer, or is of no use for the training run: it cannot
            load weights, or gives no token ids with log-probs.
    """

    shares_weights = False
    reload_apis: tuple[ReloadApi, ...] = RELOAD_APIS

    def __init__(
        self,
        address: Address,
        tokenizer: Tokenizer,
        wait_s: float = 600.0,
        concurrency: int = 32,
        *,
        stop_ids: Sequence[int] = (),
        weights_folder: Path | None = None,
        reads_pictures: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.takes_ids = True
        self.takes_ids_with_pictures = True
        self.weights: ServerWeights | None = None
        self.client, self.max_context = self.connect(address, wait_s, concurrency)
        if weights_folder is not None:
            self.weights = ServerWeights(
                address, weights_folder, wait_s, self.reload_apis, reads_pictures
            )
            self._check_token_ids(self.stop_ids[0])

    def connect(
        self, address: Address, wait_s: float, concurrency: int
    ) -> tuple[ModelClient, int | None]:
        """Return the client of a server that answers, and its context length if known."""
        client = ModelClient(address, wait_s, concurrency)
        return client, client.check()

    @property
    def url(self) -> str:
        return self.client.address.url

    @property
    def model(self) -> str:
        return self.client.address.model

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Let the server load the weights; returns when it samples from them."""
        if self.weights is None:
            raise RunError(
                f"{self.url} cannot take new weights; use it for models that are not trained"
            )
        self.weights.publish(weights)

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
        try:
            completion = self.ask(request, seed, sampling, deadline)
        except RequestRefused as error:
            raise RunError(
                f"{self.url} refused a completion of model {self.model} with "
                f"{error.status}: {first_line(error)}"
            ) from error
        if self.weights is not None:
            self._check_of_training(completion, sampling)
        return completion

    def ask(self, request: Request, seed: int, sampling: Sampling, deadline: float) -> Completion:
        """Return a completion by token ids.

        A server that refuses ids gets text, also in later calls. In a training run it does not:
        text that is tokenized again may be other tokens.

        Raises RequestRefused.
        """
        body = _sampling_fields(self.model, sampling, seed, token_limit(request, sampling))
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        if request.images:
            return self._ask_about_pictures(request, body | self._id_fields(sampling), deadline)
        if self.takes_ids:
            body["prompt"] = list(request.prompt)
            try:
                return self._post(body | self._id_fields(sampling), deadline)
            except RequestRefused as error:
                if error.status not in (400, 422) or self.weights is not None:
                    raise
        if sampling.top_k or sampling.min_p or sampling.stop:
            raise RunError(
                f"{self.url} takes text only, so top_k, min_p and stop strings cannot be used "
                "with it; remove them, or use another server"
            )
        body["prompt"] = self.tokenizer.decode_raw(request.prompt)
        completion = self._post(body, deadline)
        self.takes_ids = False
        return completion

    def _ask_about_pictures(
        self, request: Request, body: dict[str, Any], deadline: float
    ) -> Completion:
        """Return a completion of a prompt with pictures.

        Raises RequestRefused, and RunError if the server makes other ids of a chat.
        """
        refusal = ""
        if self.takes_ids_with_pictures:
            prompt = ids_with_pictures(request.prompt, request.images)
            try:
                return self._post(body | {"prompt": prompt}, deadline)
            except RequestRefused as error:
                refusal = f"{first_line(error)}; as a chat: "
        body |= {"logprobs": True, "top_logprobs": 0, **self._chat_fields(request)}
        try:
            answer = self.client.call("POST", "/chat/completions", body, deadline)
        except RequestRefused as error:
            raise RequestRefused(error.status, f"{refusal}{first_line(error)}") from error
        choice = only_choice(answer, self.url)
        seen = answer.get("prompt_token_ids") or []
        if seen != request.prompt:
            raise RunError(
                f"{self.url} makes a prompt of {len(seen)} tokens of the pictures and texts of one "
                f"of {len(request.prompt)}; use postgrad serve or rollout.engine=native"
            )
        self.takes_ids_with_pictures = False
        return self._parse_completion(choice)

    def _chat_fields(self, request: Request) -> dict[str, Any]:
        """Return a chat that vLLM renders to the prompt, with the places of pictures expanded."""
        processor = self.tokenizer.picture_processor
        text = self.tokenizer.decode_raw(processor.collapse(request.prompt, request.images))
        first, *others = text.split(processor.placeholder)
        content: list[dict[str, Any]] = [{"type": "text", "text": first}]
        # A placeholder that a policy wrote leaves texts over: the server then makes other ids.
        for picture, after in zip(request.images, others, strict=False):
            content += [
                {"type": "image_url", "image_url": {"url": picture.data_url()}},
                {"type": "text", "text": after},
            ]
        return {
            "messages": [{"role": "user", "content": content}],
            "chat_template": PARTS_TEMPLATE.replace("PLACE", processor.placeholder),
            "add_generation_prompt": False,
        }

    def _id_fields(self, sampling: Sampling) -> dict[str, Any]:
        """Return the fields of a call with token ids, which OpenAI does not have."""
        fields = {
            "logprobs": 0,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if self.weights is not None:
            # vLLM takes the model's own generation settings for fields that a call leaves out.
            fields["repetition_penalty"] = 1.0
        return fields

    def _post(self, body: dict[str, Any], deadline: float) -> Completion:
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
        values = values or [float(entry["logprob"]) for entry in logprobs.get("content") or []]
        if len(values) != len(ids):
            values = []
        return Completion([int(i) for i in ids], values, finish)

    # ---- of a training run

    def _check_token_ids(self, token: int) -> None:
        """Sample one token to check that the server takes ids and gives ids with log-probs."""
        try:
            completion = self.generate([Request([token], [0])], Sampling(1.0, 1))[0][0]
        except RunError as error:
            raise Unsupported(
                f"rollout.url: {error}; rollouts need a server that takes token ids and gives "
                "them with log-probs, such as vLLM, SGLang or postgrad serve"
            ) from error
        if not completion.tokens:
            raise Unsupported(f"rollout.url: {self.url} answered without a token")

    def _check_of_training(self, completion: Completion, sampling: Sampling) -> None:
        """Raise RunError for a completion that a training run cannot use."""
        if len(completion.logprobs) != len(completion.tokens):
            raise RunError(f"{self.url} gave no token ids with log-probs, which training needs")
        if completion.finish == "stop" and not self._ends_validly(completion, sampling):
            known = ", ".join(map(str, sorted(self.stop_ids)))
            raise RunError(
                f"{self.url} ended a row with the token {completion.tokens[-1]}, which is not a "
                f"stop token of model.path ({known}); it serves another model, or has its own "
                "stop strings"
            )

    def _ends_validly(self, completion: Completion, sampling: Sampling) -> bool:
        """Return whether a row ends with a stop token or contains a stop string."""
        if completion.tokens[-1] in self.stop_ids:
            return True
        text = self.tokenizer.decode_raw(completion.tokens) if sampling.stop else ""
        return any(string in text for string in sampling.stop)


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


def ids_with_pictures(ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the prompt of a completion that only postgrad serve takes; others refuse its form."""
    urls = [picture.data_url() for picture in pictures]
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"image": urls}}


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
