"""The numeric gate of decoding: does the engine give its tokens the log-probs of the trainer?

A few prompts are continued by the engine; the trainer's passes, which `model/load/gate.py` has held
against the stock model, compute the log-probs of the same tokens. An engine that disagrees by more
than rounding is not used: the stock generate of transformers samples instead. It is compared, too,
and a model that it samples wrongly is refused.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from postgrad.errors import RunError, first_line
from postgrad.files import atomic_write_text
from postgrad.model.load.formats import Loaded
from postgrad.model.load.gate import (
    disagreement,
    fingerprint,
    our_logprobs,
    probe_rows,
)
from postgrad.model.load.load import cache_folder
from postgrad.model.passes.layout import passes_of
from postgrad.model.passes.support import eval_mode, sees_pictures, support_of, vision_of
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch, Trajectory

NEW_TOKENS = 6


class Sampler(Protocol):
    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Completion]]: ...


def decode_problem(loaded: Loaded, engine: Sampler, name: str = "decode") -> str:
    """Return why this engine cannot sample from the model; empty when it can.

    Cached on disk, by the model's architecture and `name`, which is the engine's.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    if sees_pictures(loaded.model):
        name = f"{name}-{vision_of(loaded.model).fingerprint}"
    file = cache_folder() / "gate" / f"{fingerprint(loaded.model, sources)}-{name}.json"
    with suppress(OSError, ValueError):  # no cached verdict that can be read
        return str(json.loads(file.read_text()))
    problem = _compare(loaded, engine)
    with suppress(OSError):  # without a cache the next load measures again
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps(problem))
    return problem


def _compare(loaded: Loaded, engine: Sampler) -> str:
    rows = probe_rows(loaded.model).trajectories()
    if sees_pictures(loaded.model):
        from postgrad.model.load.picture_gate import picture_rows

        processor = vision_of(loaded.model).processor
        rows += picture_rows(processor, loaded.tokenizer).trajectories()
    prompts = dict.fromkeys((tuple(row.prompt), row.images) for row in rows)
    requests = [
        Request(list(prompt), [2 * i, 2 * i + 1], images=images)
        for i, (prompt, images) in enumerate(prompts)
    ]
    try:
        groups = engine.generate(requests, Sampling(1.0, NEW_TOKENS))
    except (torch.OutOfMemoryError, RunError):  # no memory, or damaged weights
        raise  # says nothing about the architecture, so it must not become a cached verdict
    except Exception as error:
        return first_line(error)
    continued: list[Trajectory] = []
    sampled: list[float] = []
    for number, (request, completions) in enumerate(zip(requests, groups, strict=True)):
        for index, completion in enumerate(completions):
            row = Trajectory(f"p{number}", request.prompt, completion.tokens, number, index)
            row.images = request.images
            continued.append(row)
            sampled += completion.logprobs
    batch = Batch.of(continued)
    support = support_of(loaded.model)
    with eval_mode(loaded.model):
        trained = our_logprobs(loaded.model, batch, passes_of(loaded.model, batch))
    dtype = next(loaded.model.parameters()).dtype
    return disagreement(trained.new_tensor(sampled), trained, dtype, support.rounding)
