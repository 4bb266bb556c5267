"""One response in pieces of text, while the native engine samples it."""

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from postgrad.errors import RunError
from postgrad.rollout.engine import Request, Sampling, check_requests, max_row_tokens
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.live import open_live_loop
from postgrad.rollout.native.sequence import Job, Sequence
from postgrad.rollout.stops import make_stops
from postgrad.serving.detokenizer import Detokenizer


def stream_response(
    engine: NativeEngine, tokenizer: Any, request: Request, sampling: Sampling
) -> Iterator[str]:
    """Yield the text of a request with one seed, in pieces that hold no partial character.

    Raises RunError if the row exceeds the model's context, or if its log-probs are not numbers.
    """
    check_requests([request], sampling, engine.max_context, engine.model.config)
    text = Detokenizer(tokenizer, sampling.stop)
    stop_ids = {*engine.stop_ids.tolist(), *sampling.stop_ids}
    pieces: list[str] = []

    def report(row: Sequence, num_new: int, finish: str) -> None:
        first = len(row.tokens) - num_new
        if any(map(math.isnan, row.logprobs[first:])):
            raise RunError("the model's log-probs are not numbers; its weights are broken")
        tokens = row.tokens[first:]
        ends_with_stop_token = finish == "stop" and tokens[-1] in stop_ids
        pieces.append(text.push(tokens, finish, ends_with_stop_token))

    longest = max_row_tokens(request, sampling)
    cache_bytes = engine.cache_bytes() if engine.decoder is not None else 0  # 0: slots
    with closing(open_live_loop(engine, 1, longest, cache_bytes, report)) as loop:
        loop.add(Job(request, sampling, stops=make_stops(tokenizer, sampling)))
        while loop.busy:
            with torch.no_grad():
                loop.step()
            yield from filter(None, pieces)
            pieces.clear()
