"""Responses of a model to prompts, without scoring them."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from postgrad.api.rows import as_problems
from postgrad.cluster.backends import open_engine
from postgrad.config.overrides import Override
from postgrad.data.encode.styles import stop_strings
from postgrad.errors import Conflict, RunError, Unsupported, WrongValue
from postgrad.evaluation.model import find_model
from postgrad.evaluation.plan import engine_config, make_encoder, resolve_engine_settings
from postgrad.evaluation.settings import EvalConfig, read_settings
from postgrad.model.threads import kept_threads, set_threads
from postgrad.problem import Problem
from postgrad.rollout.engine import (
    Request,
    Sampling,
    check_requests,
    make_sampling,
    make_stops,
    max_row_tokens,
    trajectory_seed,
)
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.respond import STEP, generate
from postgrad.serving.detokenizer import Detokenizer
from postgrad.training.players import open_players

# A prompt: a text, or messages such as [{"role": "user", "content": "2+2="}].
Prompt = str | Sequence[dict[str, Any]]


class Sampler:
    """A loaded model that answers prompts.

    Args:
        path: a model as `postgrad eval` takes it: run folder, checkpoint, model folder, hub id.
        overrides: settings of `postgrad eval`.

    Raises ConfigError for a model or a setting that cannot be used.
    """

    @kept_threads()
    def __init__(self, path: str, overrides: Sequence[Override] = ()) -> None:
        target = find_model(path)
        self.path = path
        # No data is read; the setting is required by evaluations.
        self.config: EvalConfig = read_settings(target.path, ["data=-", *overrides], target.config)
        rollout = self.config.rollout
        rollout.stop = stop_strings(rollout.stop, self.config.data.prompt_style)
        players = open_players(self.config, partial(make_encoder, self.config))
        self.encoder = players.encoder
        self.turns = players.turns
        resolve_engine_settings(self.config)
        if self.config.cluster.backend != "local":
            raise Unsupported(
                f"cluster.backend={self.config.cluster.backend}: generate() runs in this process; "
                "postgrad.evaluate() runs elsewhere too"
            )
        self._opened = open_engine(engine_config(self.config))
        self.engine = self._opened.__enter__()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Responses to one prompt or to several; see `postgrad.generate`."""
        is_single = _is_prompt(prompts)
        listed: Sequence[Any] = [prompts] if is_single else prompts  # type: ignore[list-item]
        problems = as_problems([_as_row(one) for one in listed], "prompts")
        groups = self.sample(problems, n, temperature, max_tokens, seed)
        results = [group[0] if n == 1 else group for group in groups]
        return results[0] if is_single else results

    def stream(self, prompt: Prompt, *, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """Yield the response to one prompt in pieces, as the native engine samples it.

        Together they are what `generate` returns, without a stop string. Other engines, and runs
        with an environment, give one piece.
        """
        if self.turns is not None or not isinstance(self.engine, NativeEngine):
            yield self.generate(prompt, temperature=temperature, seed=seed)
            return
        problems = as_problems([_as_row(prompt)], "prompts")
        self.encoder.fit(problems)
        seeds = [trajectory_seed(seed, STEP, problems[0].uid, 0)]
        ids = self.encoder.prompt(problems[0])
        request = Request(ids, seeds, images=problems[0].prompt_images)
        sampling = make_sampling(self.config.rollout, temperature)
        set_threads(self.config.model.threads)
        yield from stream_response(self.engine, self.encoder.tokenizer, request, sampling)

    @kept_threads()
    def sample(
        self,
        problems: Sequence[Problem],
        n: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Return `n` responses per problem, the same as `postgrad eval` samples with this seed.

        Temperature 0 is greedy; None is 0 for one response, otherwise 1.
        """
        if n < 1:
            raise WrongValue(f"n={n} is out of range; it must be at least 1")
        if temperature is None:
            temperature = 0.0 if n == 1 else 1.0
        if temperature == 0 and n > 1:
            raise Conflict(
                f"n={n} with temperature=0 would give {n} equal responses; "
                "use n=1, or a temperature above 0"
            )
        sampling = make_sampling(self.config.rollout, temperature)
        if max_tokens is not None:
            sampling = dataclasses.replace(sampling, max_new_tokens=max_tokens)
        self.encoder.fit(problems)
        set_threads(self.config.model.threads)
        responses = generate(self.engine, self.encoder, problems, sampling, n, seed, self.turns)
        texts = [response.text for response in responses]
        return [texts[i : i + n] for i in range(0, len(texts), n)]


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt: a text, or a list of messages."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, Path) or not prompts:
        raise WrongValue(
            f"prompts is {type(prompts).__name__}; give a text, a list of messages, "
            "or a list of either",
            at="prompts",
        )
    return isinstance(prompts[0], dict) and "role" in prompts[0]


def _as_row(prompt: Any) -> dict[str, Any]:
    """Return a prompt as a row; a row with a prompt stays as it is."""
    return prompt if isinstance(prompt, dict) else {"prompt": prompt}


def stream_response(
    engine: NativeEngine, tokenizer: Any, request: Request, sampling: Sampling
) -> Iterator[str]:
    """Yield the text of a request with one seed, in pieces that hold no partial character.

    Raises RunError if the row exceeds the model's context, or if its log-probs are not numbers.
    """
    check_requests([request], sampling, engine.max_context, engine.model.config)
    text = Detokenizer(tokenizer, sampling.stop)
    stop_ids = {*engine.stop_ids.tolist(), *sampling.stop_ids}
    longest = max_row_tokens(request, sampling)
    cache_bytes = engine.cache_bytes() if engine.decoder is not None else 0  # 0: slots
    scheduler = engine.open_server(1, longest, cache_bytes)
    job = Job(request, sampling, stops=make_stops(tokenizer, sampling), is_watched=True)
    (row,) = scheduler.add(job).sequences
    with closing(scheduler.store):
        while scheduler.busy:
            with torch.no_grad():
                scheduler.step()
            first = len(row.tokens) - row.read()
            if any(map(math.isnan, row.logprobs[first:])):
                raise RunError("the model's log-probs are not numbers; its weights are broken")
            tokens = row.tokens[first:]
            ends_with_stop_token = row.finish == "stop" and tokens[-1] in stop_ids
            if piece := text.push(tokens, row.finish, ends_with_stop_token):
                yield piece
