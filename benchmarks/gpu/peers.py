"""Rollouts and GRPO steps of other systems on one GPU, for the shapes of sizes.py.

    python benchmarks/gpu/peers.py vllm --shape 4b --rows 256 --tokens 1024 --out speed.jsonl
    python benchmarks/gpu/peers.py trl --shape 4b --problems 32 --samples 8 --tokens 1024
    python benchmarks/gpu/peers.py trl --engine transformers --shape tiny --tokens 8   # on a CPU

Weights and prompts are random, as in sizes.py. vLLM samples with and without log-probs, without
detokenizing, with a captured graph for all rows (its default ends at 512). Of vLLM's samplers only
that for top-k and top-p needs flashinfer; these rollouts use neither. TRL trains bfloat16 weights
with bfloat16 Adam state (8 bytes per weight; Postgrad's float32 state takes 18) and gradient
checkpointing, with vLLM in its process. Unsloth trains LoRA adapters. A line is written for every
measured step, so a run that is cut leaves the ones before.
"""

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import is_measured, rollout_name, step_name, write_row
from sizes import SHAPES, make_empty_model, make_model, vocabulary_size

WARM_CACHE_BYTES = 2 * 2**30  # of vLLM in a warm-up, which leaves memory to others


def random_prompts(shape: str, count: int, tokens: int) -> list[list[int]]:
    """Return the prompts of sizes.py."""
    rng = random.Random(0)
    return [[rng.randrange(2, vocabulary_size(shape)) for _ in range(tokens)] for _ in range(count)]


def run_vllm(args: argparse.Namespace) -> None:
    """Time vLLM's rollouts with and without log-probs."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm  # type: ignore[import-not-found]

    name = rollout_name(args.shape, args.rows, args.samples, args.tokens)
    variants = {"vllm": 0, "vllm without log-probs": None}
    wanted = {
        system: logprobs
        for system, logprobs in variants.items()
        if args.warm_only or not is_measured(args.out, name, system)
    }
    if not wanted:
        return
    start = time.perf_counter()
    llm = vllm.LLM(
        str(make_empty_model(Path(args.folder), args.shape)),
        dtype="float32" if args.shape == "tiny" else "bfloat16",
        enforce_eager=args.shape == "tiny",
        load_format="dummy",
        max_model_len=args.prompt + args.tokens,
        max_num_seqs=args.rows,
        gpu_memory_utilization=args.memory,
        **engine_options(args),
    )
    start_s = time.perf_counter() - start
    prompts = [
        {"prompt_token_ids": prompt}
        for prompt in random_prompts(args.shape, args.rows // args.samples, args.prompt)
    ]
    if args.warm_only:
        llm.generate(prompts[:1], vllm.SamplingParams(max_tokens=2), use_tqdm=False)
        return
    for system, logprobs in wanted.items():
        sampling = vllm.SamplingParams(
            n=args.samples,
            temperature=1.0,
            max_tokens=args.tokens,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
        )
        seconds: list[float] = []
        for _ in range(1 + args.steps):
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        best = min(seconds[1:] or seconds)
        write_row(
            args.out,
            name,
            system,
            version=vllm.__version__,
            tokens_per_second=args.rows * args.tokens / best,
            seconds=best,
            first_seconds=seconds[0],
            start_s=start_s,
        )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's graphs, and for a warm-up what compiles the same with little memory."""
    options: dict[str, Any] = {}
    if args.shape != "tiny" and not args.like_trl:
        sizes = [1 << power for power in range(args.rows.bit_length())]
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted({*sizes, args.rows})}
    if args.like_trl:  # what TRL 1.16 gives to vLLM
        options |= {"max_num_batched_tokens": 4096, "logprobs_mode": "processed_logprobs"}
        options["enable_sleep_mode"] = True
    if args.warm_only:
        options["kv_cache_memory_bytes"] = WARM_CACHE_BYTES
    return options


class StepTimer:
    """Writes a line for each step of a transformers trainer."""

    def __init__(self, args: argparse.Namespace, system: str, version: str) -> None:
        self.args = args
        self.system = system
        self.version = version
        self.begin = 0.0
        self.created = time.perf_counter()

    def callback(self) -> Any:
        """Return the trainer's callback."""
        from transformers import TrainerCallback

        timer = self

        class Timer(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                timer.begin = _now()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                timer.end(int(state.global_step))

        return Timer()

    def end(self, step: int) -> None:
        """Write the figures of a step that has ended."""
        import torch

        args = self.args
        now = _now()
        memory: dict[str, float] = {}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            memory["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            memory["device_gib"] = (total - free) / 2**30  # of all processes, vLLM's cache too
        write_row(
            args.out,
            step_name(args.shape, args.problems, args.samples, args.tokens),
            self.system,
            version=self.version,
            step=step,
            step_s=now - self.begin,
            start_s=self.begin - self.created if step == 1 else None,
            **memory,
        )


def _now() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of TRL's GRPOConfig for the work that sizes.py measures."""
    import torch

    rows = args.problems * args.samples
    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": rows // args.micro,
        "num_generations": args.samples,
        "max_completion_length": args.tokens,
        "temperature": 1.0,
        "top_k": 0,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "max_steps": args.steps + 1,
        "report_to": "none",
        "beta": 0.0,
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "gradient_checkpointing": True,
    }
    if args.engine == "vllm":
        settings |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.memory,
            "vllm_max_model_length": args.prompt + args.tokens,
            "vllm_enable_sleep_mode": True,
        }
    return settings


def make_dataset(args: argparse.Namespace) -> Any:
    """Return prompts as text of the word-level tokenizer, one token per word."""
    from datasets import Dataset

    count = 4 * args.problems
    prompts = random_prompts(args.shape, count, args.prompt)
    return Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompts])


def length_rewards(completions: list[str], **kwargs: Any) -> list[float]:
    """Return rewards that differ within every group, so that no row can be skipped."""
    from compare_common import length_reward

    return [length_reward(completion, None) for completion in completions]


def run_trl(args: argparse.Namespace) -> None:
    """Time GRPO steps of TRL, full fine-tuning."""
    import torch
    import trl  # type: ignore[import-not-found]
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    folder = make_empty_model(Path(args.folder), args.shape)
    if args.engine == "vllm":
        use_dummy_weights()
    on_gpu = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with torch.device("cuda" if on_gpu else "cpu"):
        from sizes import make_config

        model = Qwen3ForCausalLM(make_config(args.shape))
    torch.set_default_dtype(torch.float32)
    model.name_or_path = str(folder)
    model.config._name_or_path = str(folder)
    timer = StepTimer(args, f"trl with {args.engine}", trl.__version__)
    trl.GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=length_rewards,
        args=trl.GRPOConfig(**trainer_settings(args)),
        train_dataset=make_dataset(args),
        callbacks=[timer.callback()],
    ).train()


def use_dummy_weights() -> None:
    """Let vLLM start without reading weights: TRL copies the trainer's before it samples."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm  # type: ignore[import-not-found]

    make = vllm.LLM.__init__

    def with_dummy_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, load_format="dummy", **kwargs)

    vllm.LLM.__init__ = with_dummy_weights


def run_unsloth(args: argparse.Namespace) -> None:
    """Time GRPO steps of Unsloth, LoRA of rank 16."""
    import unsloth  # type: ignore[import-not-found]
    import trl  # type: ignore[import-not-found]  # isort: skip  (Unsloth changes it)

    uses_engine = args.engine == "vllm"
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        str(make_model(Path(args.folder), args.shape)),
        max_seq_length=args.prompt + args.tokens,
        load_in_4bit=False,
        fast_inference=uses_engine,
        max_lora_rank=16,
        gpu_memory_utilization=args.memory,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, target_modules=targets, use_gradient_checkpointing="unsloth"
    )
    settings = trainer_settings(args)
    for key in [key for key in settings if key.startswith("vllm_")]:
        del settings[key]  # the engine is the model's own
    timer = StepTimer(args, f"unsloth with {args.engine}", unsloth.__version__)
    trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=length_rewards,
        args=trl.GRPOConfig(**settings),
        train_dataset=make_dataset(args),
        callbacks=[timer.callback()],
    ).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("system", choices=("vllm", "trl", "unsloth"))
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--rows", type=int, default=256, help="vllm: rows in all")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per response")
    parser.add_argument("--prompt", type=int, default=100, help="tokens per prompt")
    parser.add_argument("--micro", type=int, default=8, help="trl: rows per pass")
    parser.add_argument("--steps", type=int, default=1, help="measured, after one warm-up")
    parser.add_argument("--memory", type=float, default=0.6, help="vLLM's share of the GPU")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    parser.add_argument("--warm-only", action="store_true", help="vllm: only fill its caches")
    parser.add_argument("--like-trl", action="store_true", help="vllm: TRL's settings")
    args = parser.parse_args()
    name = step_name(args.shape, args.problems, args.samples, args.tokens)
    if args.system != "vllm" and is_measured(args.out, name, f"{args.system} with {args.engine}"):
        return
    {"vllm": run_vllm, "trl": run_trl, "unsloth": run_unsloth}[args.system](args)


if __name__ == "__main__":
    main()
