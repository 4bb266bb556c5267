"""One model that is served: its tokenizer, its worker, and new weights for it."""

import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.model.device import (
    DTYPES,
    choose_device,
    choose_dtype,
    has_own_memory,
    total_memory_bytes,
)
from postgrad.model.load import load
from postgrad.problem import Problem
from postgrad.rollout.engine import Request
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.live import LiveJob
from postgrad.serving.detokenizer import TextStream
from postgrad.serving.requests import Ask, Refusal
from postgrad.serving.worker import Worker

ROWS, LARGE_ROWS = 64, 256  # decoded at once; on accelerators with memory of their own the second


@dataclass
class Served:
    """A model under the name that requests call it by."""

    name: str
    source: str  # where its tokenizer is: a folder or a hub id
    tokenizer: Any
    worker: Worker
    version: int = 0  # times it got new weights
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.plain, self.chat = Prompts(self.tokenizer, "plain"), Prompts(self.tokenizer, "auto")
        self.vocabulary = int(self.worker.engine.model.get_input_embeddings().weight.shape[0])
        self.stop_ids = set(self.worker.engine.stop_ids.tolist())

    @property
    def context(self) -> int:
        return self.worker.longest

    def jobs(self, ask: Ask) -> list[LiveJob]:
        """A job for each prompt of a request. Raises Refusal: ids that are no tokens, a prompt that does not fit."""
        seed = ask.seed if ask.seed is not None else secrets.randbits(64)
        seeds = [(seed + i) % 2**64 for i in range(ask.n)]
        return [self._job(ask, self._ids(ask, prompt), seeds) for prompt in ask.prompts]

    def _ids(self, ask: Ask, prompt: Any) -> list[int]:
        if not ask.chat and isinstance(prompt, list):
            if not all(0 <= i < self.vocabulary for i in prompt):
                raise Refusal(
                    400, f"prompt has a token id outside 0 to {self.vocabulary - 1}", "prompt"
                )
            return prompt
        messages = tuple(prompt) if ask.chat else ({"role": "user", "content": prompt},)
        try:
            with self.lock:  # a tokenizer is not made for several threads
                prompts = self.chat if ask.chat else self.plain
                if ask.template_options:
                    prompts = Prompts(self.tokenizer, "auto", options=ask.template_options)
                return prompts.encode(Problem("", messages, ""))
        except ConfigError as error:
            reason = (
                str(error)
                .removeprefix("problem : ")
                .replace("data.template_options", "chat_template_kwargs")
            )
            raise Refusal(400, reason, "messages" if ask.chat else "prompt") from error

    def _job(self, ask: Ask, ids: list[int], seeds: list[int]) -> LiveJob:
        room = self.context - len(ids)
        wanted = ask.max_tokens or max(room, 1)
        if wanted > room:
            raise Refusal(
                400,
                f"a prompt of {len(ids)} tokens and {wanted} new ones exceed the context of {self.context}; shorten the one or the other",
                "messages" if ask.chat else "prompt",
                "context_length_exceeded",
            )
        return LiveJob(Request(ids, seeds, wanted), ask.sampling, num_top=ask.num_top or 0)

    def stream(self, ask: Ask) -> TextStream:
        return TextStream(self.tokenizer, ask.sampling.stop, ask.keep_special, ask.keep_stop)

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def load_served(
    name: str,
    config: ModelConfig,
    rows: int,
    context: int,
    queue: int,
    stopping: Any,
    seed: int = 0,
    share: int = 1,
) -> Served:
    """Load a model and start its worker. `share` models live in this memory; `rows` and `context` 0 are chosen here.

    Raises:
        ConfigError: there is no such model, or a wish that it cannot have.
    """
    device = choose_device(config.device)
    config.device = device.type
    config.dtype = (
        "float32"
        if config.dtype == "auto" and device.type == "cpu"
        else choose_dtype(config.dtype, device)
    )
    loaded = load(config, device, seed)
    loaded.model.requires_grad_(False)
    engine = NativeEngine(loaded, RolloutConfig())
    if engine.stock_engine is not None:
        raise ConfigError(
            f"model {config.path} cannot be served by the native engine, whose cache holds keys and "
            "values only; serve it with --engine vllm"
        )
    if context > engine.max_context:
        raise ConfigError(f"--context {context} is more than the model's {engine.max_context}")
    context = context or engine.max_context
    memory = engine.cache_bytes() if has_own_memory(device) else total_memory_bytes(device) // 4
    fits = memory // share // (context * token_bytes(loaded.model, config.dtype))
    if fits < 1:
        raise ConfigError(
            f"the cache of one row of {context} tokens does not fit the memory; give a smaller --context"
        )
    rows = min(rows or (LARGE_ROWS if has_own_memory(device) else ROWS), fits)
    return Served(
        name, config.path, loaded.tokenizer, Worker(engine, rows, context, queue, stopping)
    )


def token_bytes(model: Any, dtype: str) -> int:
    """Bytes of one token's keys and values."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * DTYPES[dtype].itemsize


# ---- new weights


def weight_files(folder: str, below: Path) -> list[Path]:
    """The safetensors files of a folder below an allowed one, links followed. Raises Refusal."""
    try:
        place = (below / folder).resolve(strict=True)
        files = (
            [file.resolve(strict=True) for file in sorted(place.glob("*.safetensors"))]
            if place.is_dir()
            else []
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Refusal(400, "folder is not there", "folder") from error
    if not all(path.is_relative_to(below) for path in (place, *files)):
        raise Refusal(403, "folder lies outside the one that weights may come from", "folder")
    if not files:
        raise Refusal(400, "folder holds no .safetensors file", "folder")
    return files


def take_weights(model: Any, files: list[Path]) -> int:
    """Copy the tensors of the files into the model; all names and shapes are compared before the first is touched.

    Raises:
        Refusal: other names, other shapes, or files that cannot be read.
    """
    wanted = dict(model.named_parameters())
    allowed = set(model.state_dict())
    try:
        places: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name not in allowed:
                        raise Refusal(
                            400, f"{file.name} has {name}, which this model has not", "folder"
                        )
                    if name in wanted and list(wanted[name].shape) != (
                        shape := tensors.get_slice(name).get_shape()
                    ):
                        raise Refusal(
                            400,
                            f"{name} has the shape {shape}, this model's is {list(wanted[name].shape)}",
                            "folder",
                        )
                    places[name] = file
        if missing := sorted(set(wanted) - set(places)):
            raise Refusal(
                400, f"the folder has no {missing[0]} ({len(missing)} are missing)", "folder"
            )
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    for name in (name for name in wanted if places[name] == file):
                        wanted[name].copy_(tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise Refusal(
            400, f"the weights cannot be read: {str(error).splitlines()[0][:200]}", "folder"
        ) from error
    return len(wanted)
