"""Sampling parameters of requests, checked."""

import secrets

from postgrad.rollout.engine import Sampling
from postgrad.serving.tinker.requests import SampleBody, SamplingParams
from postgrad.serving.tinker.trained_model import SampleRequest, TrainedModel
from postgrad.web import HttpError


def make_sample_call(body: SampleBody, model: TrainedModel) -> tuple[Sampling, SampleRequest]:
    """Return the sampling parameters and the request for the model. Raises HttpError: 400."""
    params = body.sampling_params
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not prompt:
        raise HttpError(400, "the prompt is empty; give at least one token")
    if not all(0 <= token < model.vocabulary_size for token in prompt):
        raise HttpError(400, f"prompt has a token id outside 0 to {model.vocabulary_size - 1}")
    room = model.context - len(prompt)
    limit = params.max_tokens or max(room, 1)
    if limit > room:
        raise HttpError(
            400,
            f"a prompt of {len(prompt)} tokens and {limit} new ones exceed the context of "
            f"{model.context}; shorten the prompt or lower max_tokens",
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise HttpError(400, f"prompt_logprobs_last_n={last_n} must be 1 to {len(prompt) - 1}")
    if body.topk_sample_logprobs and params.temperature not in (0.0, 1.0):
        raise HttpError(400, "topk_sample_logprobs needs temperature=1 or temperature=0")
    seed = secrets.randbits(64) if params.seed is None else params.seed
    request = SampleRequest(
        prompt=prompt,
        seeds=[(seed + i) % 2**64 for i in range(body.num_samples)],
        max_tokens=limit,
        prompt_logprobs=body.prompt_logprobs,
        num_scored=last_n,
        num_top_prompt=body.topk_prompt_logprobs,
        num_top=body.topk_sample_logprobs,
    )
    return make_sampling(params, model.context), request


def make_sampling(params: SamplingParams, max_new_tokens: int) -> Sampling:
    """Return the sampling parameters. Raises HttpError: 400 for stops that are not supported."""
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop == []:
        raise HttpError(
            400, "stop=[] would ignore the end of text, which this server cannot; use stop=None"
        )
    texts = [item for item in stop or () if isinstance(item, str)]
    ids = [item for item in stop or () if isinstance(item, int)]
    if not all(texts):
        raise HttpError(400, "stop has an empty text; leave it out")
    return Sampling(
        temperature=params.temperature,
        max_new_tokens=max_new_tokens,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=tuple(texts),
        stop_ids=tuple(ids),
    )
