"""Rollouts from a server that takes the trainer's weights after each step.

The trainer's weights are written as safetensors to a folder that the server can read too; then a
call names the folder. `postgrad serve`, SGLang and vLLM (with VLLM_SERVER_DEV_MODE=1) each have
such a call. A server without one would sample from old weights, so training refuses it.
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
from postgrad.rollout import http_client
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.http import HttpEngine, Tokenizer
from postgrad.rollout.http_client import Address, ModelClient, RequestRefused

# Statuses that answer a reload call without arguments, on a server that has the call.
MISSING_ARGUMENTS = (400, 422)
FORBIDDEN = (401, 403)


@dataclass(frozen=True)
class ReloadApi:
    """How one kind of server loads weights from a folder; paths start at the server's root."""

    server: str
    path: str
    body: Callable[[str, str], dict[str, Any]]  # (folder, model name) -> JSON body
    reset_path: str = ""  # a call that drops the keys and values of the old weights


SGLANG_RELOAD = ReloadApi(
    "SGLang",
    "/update_weights_from_disk",
    lambda folder, model: {"model_path": folder, "flush_cache": True},
)
RELOAD_APIS = (
    ReloadApi(
        "postgrad serve",
        "/v1/reload",
        lambda folder, model: {"folder": folder, "model": model},
    ),
    SGLANG_RELOAD,
    ReloadApi(
        "vLLM",
        "/collective_rpc",
        lambda folder, model: {"method": "reload_weights", "kwargs": {"weights_path": folder}},
        "/reset_prefix_cache",
    ),
)


class SyncedHttpEngine(HttpEngine):
    """The engine of a training run behind a server.

    Args:
        address: the server and its model.
        tokenizer: of the trained model.
        stop_ids: the trained model's stop tokens; a row that ends with another token is refused.
        folder: where weights are written; the server must see it under the same path.
        wait_s: time limit per call in seconds.
        concurrency: largest number of calls at the same time.

    Raises:
        ConfigError: the server cannot load weights, or gives no token ids with log-probs.
    """

    def __init__(
        self,
        address: Address,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        folder: Path,
        wait_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        super().__init__(address, tokenizer, wait_s, concurrency)
        # vLLM takes the model's own generation settings for fields that a call leaves out.
        self.extra_fields = {"repetition_penalty": 1.0}
        self.stop_ids = set(stop_ids)
        self.folder = folder.absolute()
        self.num_published = 0
        parts = urlsplit(address.url)
        root = Address(f"{parts.scheme}://{parts.netloc}", address.model)
        self.root_client = ModelClient(root, wait_s, 1)
        self.reload_api = self._find_reload_api()
        self._check_token_ids(stop_ids[0])

    @property
    def reload_apis(self) -> tuple[ReloadApi, ...]:
        """The kinds of calls that are tried, in order."""
        return RELOAD_APIS

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Write the weights and let the server load them; returns when it samples from them."""
        folder = self._write(weights)
        deadline = time.monotonic() + self.client.wait_s
        api = self.reload_api
        url = self.root_client.address.url
        try:
            answer = self._call_root(api.path, api.body(str(folder), self.model), deadline)
            if _failed(answer):
                raise RunError(
                    f"{url}{api.path} did not load the new weights: {answer.get('message', answer)}"
                )
            if api.reset_path and _failed(self._call_root(api.reset_path, {}, deadline)):
                raise RunError(f"{url}{api.reset_path} kept keys and values of the old weights")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call_root(self, path: str, body: dict[str, Any], deadline: float) -> Any:
        try:
            return self.root_client.call("POST", path, body, deadline)
        except RequestRefused as error:
            raise RunError(
                f"{self.root_client.address.url}{path} refused new weights with "
                f"{error.status}: {error}"
            ) from error

    def _write(self, weights: dict[str, Tensor]) -> Path:
        self.num_published += 1
        folder = self.folder / f"weights-{self.num_published}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise RunError(
                f"weights for the server could not be written to {folder}: "
                f"{error.strerror or error}"
            ) from error
        return folder

    def _find_reload_api(self) -> ReloadApi:
        """Call each kind's path without arguments: a server that has it reports what is missing."""
        url = self.root_client.address.url
        for api in self.reload_apis:
            deadline = time.monotonic() + min(http_client.START_S, self.client.wait_s)
            try:
                self.root_client.call("POST", api.path, {}, deadline)
            except RequestRefused as error:
                if error.status in MISSING_ARGUMENTS:
                    return api
                if error.status in FORBIDDEN:
                    raise ConfigError(
                        f"rollout.url: {url}{api.path} answers {error.status}: {error}"
                    ) from error
            except RunError as error:
                raise ConfigError(f"rollout.url: {url} {error}") from error
        raise ConfigError(
            f"rollout.url: {url} has no call that loads new weights, so training would sample from "
            "old ones; start vLLM with VLLM_SERVER_DEV_MODE=1, use SGLang or postgrad serve "
            "--reload-below, or rollout.engine=vllm"
        )

    def _check_token_ids(self, token: int) -> None:
        """Sample one token to check that the server takes ids and gives ids with log-probs."""
        try:
            completion = self.generate([Request([token], [0])], Sampling(1.0, 1))[0][0]
        except RunError as error:
            raise ConfigError(f"rollout.url: {error}") from error
        if not completion.tokens:
            raise ConfigError(f"rollout.url: {self.url} answered without a token")

    def _complete(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        """Complete with token ids only: text that is tokenized again may be other tokens."""
        try:
            completion = self._post(request, seed, sampling, deadline, with_ids=True)
        except RequestRefused as error:
            raise RunError(
                f"{self.url} refused a completion of model {self.model} by token ids with "
                f"{error.status}: {error}; rollouts need a server that takes them, such as vLLM, "
                "SGLang or postgrad serve"
            ) from error
        if len(completion.logprobs) != len(completion.tokens):
            raise RunError(
                f"{self.url} gave no token ids with log-probs, which training needs; "
                "use vLLM, SGLang or postgrad serve"
            )
        if completion.finish == "stop" and not self._ends_validly(completion, sampling):
            known = ", ".join(map(str, sorted(self.stop_ids)))
            raise RunError(
                f"{self.url} ended a row with the token {completion.tokens[-1]}, which is not a "
                f"stop token of model.path ({known}); it serves another model, or has its own "
                "stop strings"
            )
        return completion

    def _ends_validly(self, completion: Completion, sampling: Sampling) -> bool:
        """Return whether a row ends with a stop token or contains a stop string."""
        if completion.tokens[-1] in self.stop_ids:
            return True
        text = self.tokenizer.decode_raw(completion.tokens) if sampling.stop else ""
        return any(string in text for string in sampling.stop)


def _failed(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("success") is False
