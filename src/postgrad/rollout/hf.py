"""The slow truth: transformers' own generate over the trainer's own parameters.

Nothing here is ours but the choice of the token: the model's forward, its cache and its stop rule are the library's. What the faster
engines sample is held against this one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.config.schema import RolloutConfig
from postgrad.model.load import stop_ids
from postgrad.model.loaded import Loaded
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    check_room,
    limit_of,
    take_weights,
)
from postgrad.rollout.native.sampling import RowRandom, pick
from postgrad.rollout.stops import StopStrings


class HfEngine:
    """Samples from `loaded.model` by transformers' generate: the rows of a prompt together, prompt after prompt, so nothing is padded."""

    shares_weights = True

    def __init__(self, loaded: Loaded, config: RolloutConfig) -> None:
        self.model, self.tokenizer, self.max_rows = (
            loaded.model,
            loaded.tokenizer,
            config.max_rows or 256,
        )
        self.device = next(self.model.parameters()).device
        self.stop = stop_ids(loaded)
        self.max_context = int(self.model.config.get_text_config().max_position_embeddings)

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Take weights from a trainer that lives elsewhere."""
        take_weights(self.model, weights)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        check_room(requests, sampling, self.max_context)
        with self._plain():
            out = [self._continue(request, sampling) for request in requests]
        if not sampling.stop:
            return out
        stops = StopStrings(self.tokenizer, sampling.stop)
        return [[stops.cut(done) for done in group] for group in out]

    def _continue(self, request: Request, sampling: Sampling) -> list[Completion]:
        parts = range(0, len(request.seeds), self.max_rows)
        return [
            done
            for start in parts
            for done in self._rows(request, request.seeds[start : start + self.max_rows], sampling)
        ]

    def _rows(self, request: Request, seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        limit = limit_of(request, sampling)
        prompt = torch.tensor(request.prompt, device=self.device).expand(len(seeds), -1)
        choice = _Choice(seeds, sampling)
        ids = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            logits_processor=[choice],
            max_new_tokens=limit,
        )[:, prompt.shape[1] :]
        logprobs = torch.stack(choice.logprobs, 1).tolist()
        return [
            self._completion(tokens, own)
            for tokens, own in zip(ids.tolist(), logprobs, strict=True)
        ]

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        """A row as far as its stop token; what generate appends while others go on is padding."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
        return Completion(tokens[:end], logprobs[:end], "length" if end is None else "stop")

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """The model's own generation settings (penalties, filters) would change what is sampled: they are set aside."""
        from transformers import GenerationConfig

        own = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self.stop, pad_token_id=self.stop[0], use_cache=True
        )
        self.model.eval()
        try:
            yield
        finally:
            self.model.generation_config = own
            self.model.train()


class _Choice:
    """A logits processor that draws each row's token from the row's own random numbers and leaves generate no other."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        self.random, self.sampling = [RowRandom(seed) for seed in seeds], sampling
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        uniforms = np.concatenate([random.numbers(1) for random in self.random])
        tokens, logprobs = pick(
            scores.float(), torch.from_numpy(uniforms).to(scores.device), self.sampling
        )
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)
