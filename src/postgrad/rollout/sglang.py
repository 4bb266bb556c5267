"""Rollouts from an SGLang server, by its own calls: /generate and /update_weights_from_disk.

The request and the answer have SGLang's names: `input_ids`, `sampling_params.max_new_tokens`,
`output_token_logprobs`. Log-probs are at the sampling temperature, unless the server was started
with SGLANG_RETURN_ORIGINAL_LOGPROB=1; the check before the first step finds that. Seeds have an
effect with --enable-deterministic-inference. With top-p, top-k or min-p in training, the server
returns what it kept (`return_sampling_mask`).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from postgrad.errors import ConfigError, RunError
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.http import HttpEngine, Tokenizer
from postgrad.rollout.http_client import START_S, Address, ModelClient, RequestRefused
from postgrad.rollout.http_sync import SGLANG_RELOAD, ReloadApi, SyncedHttpEngine


class SglangClient(ModelClient):
    """Calls to an SGLang server. Its own calls are at the root, not under /v1."""

    def __init__(self, address: Address, wait_s: float, concurrency: int) -> None:
        parts = urlsplit(address.url)
        root = Address(f"{parts.scheme}://{parts.netloc}", address.model)
        super().__init__(root, wait_s, concurrency)

    def check(self) -> int | None:
        """Check that SGLang answers. New weights change the model's name, so it is not compared.

        Raises ConfigError.
        """
        deadline = time.monotonic() + min(START_S, self.wait_s)
        try:
            answer = self.call("GET", "/model_info", None, deadline)
        except (RunError, RequestRefused) as error:
            raise ConfigError(
                f"rollout.url: {self.address.url}/model_info does not answer as SGLang does: "
                f"{error}; start one with python -m sglang.launch_server, or use "
                "rollout.engine=http"
            ) from error
        if not isinstance(answer, dict) or not answer.get("is_generation", True):
            raise ConfigError(f"rollout.url: the model at {self.address.url} does not generate")
        return None


class SglangEngine(HttpEngine):
    """The engine port over an SGLang server with fixed weights.

    Args:
        address: the server and its model, http://host:30000/v1#model.
        tokenizer: of the served model.
        stop_ids: tokens that end a response.
        wait_s: time limit per call in seconds.
        concurrency: largest number of calls at the same time.
    """

    Client = SglangClient

    def __init__(
        self,
        address: Address,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        wait_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        super().__init__(address, tokenizer, wait_s, concurrency)
        self.end_ids = list(stop_ids)

    def _complete(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        try:
            return self._post(request, seed, sampling, deadline)
        except RequestRefused as error:
            raise RunError(
                f"{self.url} refused a completion of model {self.model} with "
                f"{error.status}: {error}"
            ) from error

    def _post(
        self,
        request: Request,
        seed: int,
        sampling: Sampling,
        deadline: float,
        with_ids: bool = True,
    ) -> Completion:
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": sampling_params(request, seed, sampling, self.end_ids),
            "return_logprob": True,
        }
        if sampling.record_kept:
            body["return_sampling_mask"] = True
        answer = self.client.call("POST", "/generate", body, deadline)
        return parse_completion(answer, sampling.record_kept, self.url)


class SyncedSglangEngine(SglangEngine, SyncedHttpEngine):
    """The engine of a training run behind an SGLang server, which loads new weights from a folder.

    Its arguments are those of SyncedHttpEngine.
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
        self.end_ids = list(stop_ids)
        SyncedHttpEngine.__init__(self, address, tokenizer, stop_ids, folder, wait_s, concurrency)

    def _complete(
        self, request: Request, seed: int, sampling: Sampling, deadline: float
    ) -> Completion:
        return SyncedHttpEngine._complete(self, request, seed, sampling, deadline)

    @property
    def reload_apis(self) -> tuple[ReloadApi, ...]:
        return (SGLANG_RELOAD,)


def sampling_params(
    request: Request, seed: int, sampling: Sampling, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the `sampling_params` of a call. Only `stop_ids` and stop strings end a response."""
    params: dict[str, Any] = {
        "max_new_tokens": token_limit(request, sampling),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "sampling_seed": seed % 2**31,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # stop_token_ids has all stop tokens
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return params


def parse_completion(answer: Any, with_kept: bool, url: str) -> Completion:
    """Return the completion of an answer of /generate. Raises RunError if parts are missing."""
    info = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = (info or {}).get("finish_reason") or {}
    if not info or reason.get("type") not in ("stop", "length"):
        seen = reason.get("message") or reason.get("type") or "an answer without meta_info"
        raise RunError(f"{url} did not finish a completion: {seen}")
    pairs = info.get("output_token_logprobs") or []
    tokens = [int(entry[1]) for entry in pairs]
    logprobs = [float(entry[0]) for entry in pairs]
    kept_ids: list[list[int]] | None = None
    if with_kept:
        kept_ids = info.get("output_token_sampling_mask") or []
        logprobs = info.get("output_token_sampling_logprobs") or []
        if len(kept_ids) != len(tokens) or len(logprobs) != len(tokens) or None in kept_ids:
            raise RunError(
                f"{url} did not return what top-p, top-k or min-p kept for each token; it needs "
                "return_sampling_mask of SGLang 0.5.23, or remove the filter"
            )
    return Completion(tokens, logprobs, reason["type"], kept_ids=kept_ids)
