"""The reference engine: transformers' own generate over the trainer's own parameters. It is slow.

Only the choice of the token is ours; the forward pass, the cache and the stop rule are those of
transformers. The tests compare the faster engines with this one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad import phases
from postgrad.config.schema import RolloutConfig
from postgrad.errors import Unsupported
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import stop_ids
from postgrad.model.passes.support import STOCK_ATTENTION, set_attention, vision_of
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    StopStrings,
    check_requests,
    copy_weights,
    token_limit,
)
from postgrad.rollout.native.gate import decode_problem
from postgrad.rollout.native.sampling import SeededRandom, sample_tokens, truncate


class HfEngine:
    """Samples from `loaded.model` with transformers' generate.

    One generate call holds rows of one prompt only, at most rollout.max_rows, so nothing is padded.
    """

    shares_weights = True

    def __init__(self, loaded: Loaded, config: RolloutConfig) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.max_rows = config.max_rows or 256
        self.device = next(self.model.parameters()).device
        self.stop_ids = stop_ids(loaded)
        self.max_context = context_length(self.model.config)
        if reason := decode_problem(loaded, self, "generate"):
            raise Unsupported(
                f"transformers' generate gives {type(self.model).__name__} other log-probs than "
                f"its forward pass ({reason}); sample with another engine, or train another model",
                at="rollout.engine",
            )

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Load weights from a trainer in another process."""
        copy_weights(self.model, weights)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        check_requests(requests, sampling, self.max_context, self.model.config)
        has_pictures = any(request.images for request in requests)
        with self._neutral_generation_config(), _attention_for(self.model, has_pictures):
            groups: list[list[Completion]] = []
            for request in requests:
                groups.append(self._generate_group(request, sampling))
                phases.count(len(groups), len(requests))
        if not sampling.stop:
            return groups
        stops = StopStrings(self.tokenizer, sampling.stop)
        return [[stops.cut(completion) for completion in group] for group in groups]

    def _generate_group(self, request: Request, sampling: Sampling) -> list[Completion]:
        completions: list[Completion] = []
        for start in range(0, len(request.seeds), self.max_rows):
            seeds = request.seeds[start : start + self.max_rows]
            completions += self._generate_rows(request, seeds, sampling)
        return completions

    def _generate_rows(
        self, request: Request, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        prompt = torch.tensor(request.prompt, device=self.device).expand(len(seeds), -1)
        inputs: dict[str, Tensor] = {}
        if request.images:
            inputs = vision_of(self.model).stock_inputs(self.model, prompt, request.images)
        sampler = _SeededSampler(seeds, sampling)
        ids = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            **inputs,
            logits_processor=[sampler],
            max_new_tokens=token_limit(request, sampling),
        )[:, prompt.shape[1] :]
        logprobs = torch.stack(sampler.logprobs, 1).tolist()
        kept_ids = [list(row) for row in zip(*sampler.kept_ids, strict=True)]
        rows = zip(ids.tolist(), logprobs, kept_ids, strict=True)
        return [
            self._completion(tokens, row_logprobs, row_kept if sampling.record_kept else None)
            for tokens, row_logprobs, row_kept in rows
        ]

    def _completion(
        self, tokens: list[int], logprobs: list[float], kept_ids: list[list[int]] | None
    ) -> Completion:
        """Cut a row after its first stop token; generate pads it while other rows continue."""
        completion = Completion(tokens, logprobs, "length", kept_ids=kept_ids)
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                return completion.cut(i + 1)
        return completion

    @contextmanager
    def _neutral_generation_config(self) -> Iterator[None]:
        """Replace the model's generation settings: its penalties and filters would bias samples."""
        from transformers import GenerationConfig

        original = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0],
            use_cache=True,
        )
        self.model.eval()
        try:
            yield
        finally:
            self.model.generation_config = original
            self.model.train()


@contextmanager
def _attention_for(model: Any, has_pictures: bool) -> Iterator[None]:
    """Let pictures meet the stock attention, whose masks know how their tokens see each other."""
    attention = model.config._attn_implementation
    if has_pictures:
        set_attention(model, STOCK_ATTENTION)
    try:
        yield
    finally:
        if has_pictures:
            set_attention(model, attention)


class _SeededSampler:
    """A logits processor that samples each row's token from the row's own random numbers.

    It gives all other tokens a score of -inf, so that generate's argmax takes the sampled one.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        self.seeds = seeds
        self.random = SeededRandom()
        self.sampling = sampling
        self.logprobs: list[Tensor] = []  # one (rows,) tensor per step
        self.kept_ids: list[list[list[int]]] = []  # per step and row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        place = len(self.logprobs)
        uniforms = np.concatenate([self.random.draw(seed, place, 1) for seed in self.seeds])
        tokens, logprobs = sample_tokens(
            scores.float(), torch.from_numpy(uniforms).to(scores.device), self.sampling
        )
        samplings = [self.sampling] * len(self.seeds)
        self.kept_ids.append(truncate(scores.float(), logprobs, samplings))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)
