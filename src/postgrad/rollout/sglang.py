"""Rollouts from an SGLang server, by its own calls: /generate and /update_weights_from_disk.

The request and the answer have SGLang's names: `input_ids`, `sampling_params.max_new_tokens`,
`output_token_logprobs`. Log-probs are at the sampling temperature, unless the server was started
with SGLANG_RETURN_ORIGINAL_LOGPROB=1; the check before the first step finds that. Seeds have an
effect with --enable-deterministic-inference. With top-p, top-k or min-p in training, the server
returns what it kept (`return_sampling_mask`).
"""

import time
from collections.abc import Sequence
from typing import Any

from postgrad.errors import RunError, Unreachable, Unsupported
from postgrad.rollout.engine import Completion, Request, Sampling, refuse_pictures, token_limit
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import START_S, Address, ModelClient, RequestRefused
from postgrad.rollout.http_sync import SGLANG_RELOAD


class SglangEngine(HttpEngine):
    """The engine port over an SGLang server, http://host:30000/v1#model.

    Its own calls are at the root, not under /v1. `stop_ids` end a response.
    """

    reload_apis = (SGLANG_RELOAD,)

    def connect(
        self, address: Address, wait_s: float, concurrency: int
    ) -> tuple[ModelClient, int | None]:
        """Check that SGLang answers. New weights change the model's name, so it is not compared.

        Raises ConfigError.
        """
        client = ModelClient(address.root, wait_s, concurrency)
        url = client.address.url
        deadline = time.monotonic() + min(START_S, wait_s)
        try:
            answer = client.call("GET", "/model_info", None, deadline)
        except (RunError, RequestRefused) as error:
            raise Unreachable(
                f"rollout.url: {url}/model_info does not answer as SGLang does: {error}; start one "
                "with python -m sglang.launch_server, or use rollout.engine=http"
            ) from error
        if not isinstance(answer, dict) or not answer.get("is_generation", True):
            raise Unsupported(f"rollout.url: the model at {url} does not generate")
        return client, None

    def ask(self, request: Request, seed: int, sampling: Sampling, deadline: float) -> Completion:
        """Return a completion by /generate. Raises RequestRefused."""
        refuse_pictures([request], "models behind SGLang are")
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": sampling_params(request, seed, sampling, self.stop_ids),
            "return_logprob": True,
        }
        if sampling.record_kept:
            body["return_sampling_mask"] = True
        answer = self.client.call("POST", "/generate", body, deadline)
        return parse_completion(answer, sampling.record_kept, self.url)


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
