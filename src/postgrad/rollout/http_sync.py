"""Rollouts from a server: an HTTP engine whose weights follow the trainer's.

The trainer's weights are written as safetensors into a folder that the server can read too, and a call names the folder. Which call, a
server tells by answering it: `postgrad serve`, SGLang and vLLM (with VLLM_SERVER_DEV_MODE=1) each have one. A server without would go on
sampling from old weights, so training refuses it at the start.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import ConfigError, RunError
from postgrad.rollout import http
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.http import Address, HttpClient, HttpEngine, RequestRefused, Text

INCOMPLETE, FORBIDDEN = (
    (400, 422),
    (401, 403),
)  # answers to a call without its arguments, where there is such a call


@dataclass(frozen=True)
class Way:
    """How one kind of server takes weights from a folder: calls, from the server's root, with their bodies."""

    server: str
    path: str
    body: Callable[[str, str], dict[str, Any]]  # of the folder and the model's name
    then: str = ""  # a call without a body that drops keys and values computed with the old weights


WAYS = (
    Way("postgrad serve", "/v1/reload", lambda folder, model: {"folder": folder, "model": model}),
    Way(
        "SGLang",
        "/update_weights_from_disk",
        lambda folder, model: {"model_path": folder, "flush_cache": True},
    ),
    Way(
        "vLLM",
        "/collective_rpc",
        lambda folder, model: {"method": "reload_weights", "kwargs": {"weights_path": folder}},
        "/reset_prefix_cache",
    ),
)


class SyncedHttpEngine(HttpEngine):
    """The rollouts of a run from a server: token ids with log-probs or nothing, and new weights after each step.

    `folder` is where weights are written; the server must see it under the same name.
    """

    def __init__(
        self,
        address: Address,
        text: Text,
        stop: Sequence[int],
        folder: Path,
        wait_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        super().__init__(address, text, wait_s, concurrency)
        self.more = {
            "repetition_penalty": 1.0
        }  # vLLM takes the model's own settings for what a call does not say
        self.stop, self.folder, self.number = set(stop), folder.absolute(), 0
        parts = urlsplit(address.url)
        self.root = HttpClient(
            Address(f"{parts.scheme}://{parts.netloc}", address.model), wait_s, 1
        )
        self.way = self._find_way()
        self._check_ids(stop[0])

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Write the weights and let the server read them; returns when it samples from them."""
        folder = self._write(weights)
        deadline = time.monotonic() + self.server.wait_s
        try:
            self._tell(
                self.way.path, self.way.body(str(folder), self.server.address.model), deadline
            )
            if self.way.then:
                answer = self._tell(self.way.then, {}, deadline)
                if isinstance(answer, dict) and answer.get("success") is False:
                    raise RunError(
                        f"{self.root.address.url}{self.way.then} kept keys and values of the old weights"
                    )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _tell(self, path: str, body: dict[str, Any], deadline: float) -> Any:
        try:
            answer = self.root.call("POST", path, body, deadline)
        except RequestRefused as error:
            raise RunError(
                f"{self.root.address.url}{path} refused new weights with {error.status}: {error}"
            ) from error
        if isinstance(answer, dict) and answer.get("success") is False and path == self.way.path:
            raise RunError(
                f"{self.root.address.url}{path} did not take the new weights: {answer.get('message', answer)}"
            )
        return answer

    def _write(self, weights: dict[str, Tensor]) -> Path:
        self.number += 1
        folder = self.folder / f"weights-{self.number}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise RunError(
                f"weights for the server could not be written to {folder}: {error.strerror or error}"
            ) from error
        return folder

    def _find_way(self) -> Way:
        """Each kind's call is tried without its arguments: a server that has it says so, one that has not does not know it."""
        for way in WAYS:
            try:
                self.root.call(
                    "POST", way.path, {}, time.monotonic() + min(http.START_S, self.server.wait_s)
                )
            except RequestRefused as error:
                if error.status in INCOMPLETE:
                    return way
                if error.status in FORBIDDEN:
                    raise ConfigError(
                        f"rollout.url: {self.root.address.url}{way.path} answers {error.status}: {error}"
                    ) from error
            except RunError as error:
                raise ConfigError(f"rollout.url: {self.root.address.url} {error}") from error
        raise ConfigError(
            f"rollout.url: {self.root.address.url} has no call that takes new weights, so training would sample from old ones; "
            "start vLLM with VLLM_SERVER_DEV_MODE=1, use SGLang or postgrad serve --reload-below, or rollout.engine=vllm"
        )

    def _has_stop_string(self, done: Completion, sampling: Sampling) -> bool:
        text = self.text.decode_raw(done.tokens) if sampling.stop else ""
        return any(string in text for string in sampling.stop)

    def _check_ids(self, token: int) -> None:
        """One token, to see that the server takes ids and gives ids and log-probs."""
        try:
            done = self.generate([Request([token], [0])], Sampling(1.0, 1))[0][0]
        except RunError as error:
            raise ConfigError(f"rollout.url: {error}") from error
        if not done.tokens:
            raise ConfigError(f"rollout.url: {self.server.address.url} answered without a token")

    def _continue(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        """By token ids, or not at all: what is tokenized again is not what was sampled."""
        try:
            done = self._ask(request, seed, sampling, deadline, as_ids=True)
        except RequestRefused as error:
            raise RunError(
                f"{self.server.address.url} refused a completion of model {self.server.address.model} by token ids with "
                f"{error.status}: {error}; rollouts need a server that takes them, such as vLLM, SGLang or postgrad serve"
            ) from error
        if len(done.logprobs) != len(done.tokens):
            raise RunError(
                f"{self.server.address.url} gave no token ids with log-probs, which training needs; use vLLM, SGLang or postgrad serve"
            )
        if (
            done.finish == "stop"
            and done.tokens[-1] not in self.stop
            and not self._has_stop_string(done, sampling)
        ):
            raise RunError(
                f"{self.server.address.url} ended a row with the token {done.tokens[-1]}, which does not end one here "
                f"({', '.join(map(str, sorted(self.stop)))} do); it has another model than model.path, or stop words of its own"
            )
        return done
