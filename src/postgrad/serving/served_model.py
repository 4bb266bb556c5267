"""One served model: its tokenizer, its worker, and loading new weights into it."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.errors import TooLarge, Unsupported, first_line
from postgrad.model.device import (
    DTYPES,
    choose_device,
    choose_dtype,
    has_own_memory,
    total_memory_bytes,
)
from postgrad.model.load.load import load
from postgrad.model.passes.support import sees_pictures, vision_of
from postgrad.pictures import Picture
from postgrad.rollout.engine import Request
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.pages import PAGE, kv_token_bytes
from postgrad.rollout.native.sequence import Job
from postgrad.serving.memory import SMALLER_MODEL, memory_errors_as
from postgrad.serving.model_text import ModelText, pictures_of
from postgrad.serving.requests import ApiError, GenerationRequest
from postgrad.serving.worker import DecodeWorker

# Default number of rows that decode at the same time; the second on accelerators with own memory.
DEFAULT_ROWS = 64
DEFAULT_ACCELERATOR_ROWS = 256


class ServedModel(ModelText):
    """A model under the name that requests use.

    Args:
        name: the name that requests use.
        source: where its tokenizer is: a folder or a hub id.
        tokenizer: a transformers tokenizer.
        worker: decodes the requests.
    """

    def __init__(self, name: str, source: str, tokenizer: Any, worker: DecodeWorker) -> None:
        engine = worker.engine
        vocabulary_size = int(engine.model.get_input_embeddings().weight.shape[0])
        stop_ids = set(engine.stop_ids.tolist())
        super().__init__(name, tokenizer, stop_ids, vocabulary_size, max_tokens=worker.longest)
        self.source = source
        self.worker = worker
        self.encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.reads_pictures = sees_pictures(engine.model)
        self.version = 0  # number of weight reloads

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its response."""
        return self.worker.longest

    async def make_jobs(self, request: GenerationRequest) -> list[Job]:
        """Return one job per prompt of a request.

        Encoder are encoded in a thread of their own; requests take turns, prompt by prompt.
        Raises ApiError for ids outside the vocabulary and for prompts that do not fit.
        """
        loop = asyncio.get_running_loop()
        jobs: list[Job] = []
        for prompt in request.prompts:
            ids = await loop.run_in_executor(self.encoder, self.encode, request, prompt)
            seed = secrets.randbits(64) if request.seed is None else request.seed
            seeds = [(seed + i) % 2**64 for i in range(request.n)]
            jobs.append(self._make_job(request, ids, seeds, pictures_of(request, prompt)))
        return jobs

    def _make_job(
        self,
        request: GenerationRequest,
        ids: list[int],
        seeds: list[int],
        pictures: tuple[Picture, ...],
    ) -> Job:
        max_new_tokens = self.context - len(ids)
        limit = request.token_limit
        if limit is None:
            limit = max(max_new_tokens, 1)
        if limit > max_new_tokens:
            raise ApiError(
                400,
                f"a prompt of {len(ids)} tokens and {limit} new ones exceed the context of "
                f"{self.context}; shorten the prompt or lower {request.limit_field}",
                request.prompt_field,
                "context_length_exceeded",
            )
        return Job(
            # An echo without new tokens still needs a row; its token is not sent.
            Request(ids, seeds, max(limit, 1), pictures),
            request.sampling,
            num_top=request.num_top or 0,
            scores_prompt=request.echoes_prompt and request.num_top is not None,
        )


def load_served_model(
    name: str,
    config: ModelConfig,
    rows: int,
    context: int,
    queue: int,
    stopping: Callable[[], bool],
    seed: int = 0,
    num_models: int = 1,
) -> ServedModel:
    """Load a model and start its worker.

    Args:
        name: the name that requests use.
        config: the model; its device and dtype are resolved in place.
        rows: rows that decode at the same time; 0 chooses.
        context: tokens per row; 0 takes the model's.
        queue: rows that may wait.
        stopping: whether the server is shutting down.
        seed: for models that are made in code.
        num_models: models that share the memory.

    Raises:
        ConfigError: the model does not exist, or it cannot have these rows and context.
    """
    device = choose_device(config.device)
    config.device = device.type
    if config.dtype == "auto" and device.type == "cpu":
        config.dtype = "float32"
    else:
        config.dtype = choose_dtype(config.dtype, device)
    with memory_errors_as(TooLarge, SMALLER_MODEL):
        loaded = load(config, device, seed)
        loaded.model.requires_grad_(False)
        engine = NativeEngine(loaded, RolloutConfig())
    if engine.stock_engine is not None:
        raise Unsupported(
            f"model {config.path} cannot be served: the native engine's cache holds keys and "
            "values only; serve it with `vllm serve`",
            at="model",
        )
    if context > engine.max_context:
        raise TooLarge(f"--context {context} is more than the model's {engine.max_context}")
    context = context or engine.max_context
    on_accelerator = has_own_memory(device)
    memory = engine.cache_bytes() if on_accelerator else total_memory_bytes(device) // 4
    token_bytes = kv_token_bytes(loaded.model.config, DTYPES[config.dtype])
    row_bytes = context * token_bytes
    if engine.decoder is not None:  # prompt and response begin on pages of their own
        row_bytes += 3 * PAGE * token_bytes
    max_rows = memory // num_models // row_bytes
    if max_rows < 1:
        raise TooLarge(
            f"the cache of one row of {context} tokens does not fit in memory; "
            "give a smaller --context",
            at="--context",
        )
    rows = rows or (DEFAULT_ACCELERATOR_ROWS if on_accelerator else DEFAULT_ROWS)
    if engine.decoder is None:  # a slot has memory for the whole context, pages come one by one
        rows = min(rows, max_rows)
    cache_bytes = memory // num_models
    with memory_errors_as(TooLarge):
        engine.warm_up_server(rows, context, cache_bytes)
    worker = DecodeWorker(engine, rows, context, queue, cache_bytes, stopping)
    return ServedModel(name, config.path, loaded.tokenizer, worker)


def end_requests(models: Sequence[ServedModel]) -> None:
    """Send 503 to the requests that are running at the end of the grace period."""
    for served in models:
        served.worker.end_requests()


# ---- new weights


def find_weight_files(folder: str, allowed_folder: Path) -> list[Path]:
    """Return the safetensors files of a folder below the allowed one, with links resolved.

    Raises ApiError.
    """
    try:
        path = (allowed_folder / folder).resolve(strict=True)
        files: list[Path] = []
        if path.is_dir():
            files = [file.resolve(strict=True) for file in sorted(path.glob("*.safetensors"))]
    except (OSError, ValueError, RuntimeError) as error:
        raise ApiError(400, "folder does not exist", "folder") from error
    if not all(entry.is_relative_to(allowed_folder) for entry in (path, *files)):
        raise ApiError(403, "folder is outside the folder of --reload-below", "folder")
    if not files:
        raise ApiError(400, "folder has no .safetensors file", "folder")
    return files


def load_weights(model: Any, files: list[Path]) -> int:
    """Copy the tensors of the files into the model; returns their number.

    All names, shapes and values are checked before the first tensor is copied.

    Raises:
        ApiError: other names, other shapes, NaN or infinity, or files that cannot be read.
    """
    parameters = dict(model.named_parameters())
    try:
        file_of = _check_weights(model, parameters, files)
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    for name, parameter in parameters.items():
                        if file_of[name] == file:
                            parameter.copy_(tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        reason = first_line(error)
        raise ApiError(400, f"the weights cannot be read: {reason}", "folder") from error
    if sees_pictures(model):
        vision_of(model).kept.clear()  # features of the weights before
    return len(parameters)


def _check_weights(model: Any, parameters: dict[str, Any], files: list[Path]) -> dict[str, Path]:
    """Return the file of each tensor. Raises ApiError for other names, shapes, and no numbers."""
    known = set(model.state_dict())
    file_of: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name not in known:
                    raise ApiError(
                        400, f"{file.name} has {name}, which this model has not", "folder"
                    )
                if name in parameters:
                    _check_shape(name, tensors.get_slice(name).get_shape(), parameters[name])
                    _check_finite(name, tensors.get_tensor(name).to(parameters[name].dtype))
                file_of[name] = file
    missing = sorted(set(parameters) - set(file_of))
    if missing:
        raise ApiError(
            400, f"the folder has no {missing[0]} ({len(missing)} are missing)", "folder"
        )
    return file_of


def _check_shape(name: str, shape: list[int], parameter: Any) -> None:
    expected = list(parameter.shape)
    if shape != expected:
        raise ApiError(400, f"{name} has the shape {shape}, this model's is {expected}", "folder")


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ApiError for a value that would make every response of the model fail."""
    if not tensor.isfinite().all():
        raise ApiError(400, f"{name} has values that are NaN or infinite", "folder")
