"""Rollouts and GRPO steps on one GPU, with random weights of Qwen3's shapes.

    python benchmarks/gpu/sizes.py step --shape 1.7b --problems 64 --samples 16 --tokens 512
    python benchmarks/gpu/sizes.py rollout --shape 4b --rows 256 --tokens 1024
    python benchmarks/gpu/sizes.py step --shape 8b ... optimizer.kind=adamw_offloaded

Random weights never end a response, so every row has its full length. Model folders are written
once to --folder. A run is killed after its last measured step, before it saves a checkpoint.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VOCABULARY = 151_936
SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, tied embeddings
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
    "tiny": (64, 128, 2, 2, 1, True),  # to try a benchmark on a CPU
}


def vocabulary_size(shape: str) -> int:
    """Return the number of tokens that a model of this shape knows."""
    return 512 if shape == "tiny" else VOCABULARY


def make_config(shape: str) -> Any:
    """Return the transformers configuration of a Qwen3 model of this shape."""
    from transformers import Qwen3Config

    hidden, intermediate, layers, heads, key_heads, tied = SHAPES[shape]
    return Qwen3Config(
        vocab_size=vocabulary_size(shape),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


def make_model(folder: Path, shape: str) -> Path:
    """Write a Qwen3 model of this shape with random weights and a word-level tokenizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    target = folder / f"qwen3-{shape}"
    if (target / "tokenizer.json").is_file():
        return target
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.float32 if shape == "tiny" else torch.bfloat16)
        model = Qwen3ForCausalLM(make_config(shape))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(target)
    write_tokenizer(target, vocabulary_size(shape))
    return target


def make_empty_model(folder: Path, shape: str) -> Path:
    """Write configuration and tokenizer without weights, for engines that make up their own."""
    target = folder / f"qwen3-{shape}-empty"
    if not (target / "tokenizer.json").is_file():
        config = make_config(shape)
        config.architectures = ["Qwen3ForCausalLM"]
        config.dtype = "bfloat16"
        config.save_pretrained(target)
        write_tokenizer(target, vocabulary_size(shape))
    return target


def write_tokenizer(target: Path, size: int) -> None:
    """Write a word-level tokenizer of this many words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(target)


def make_data(folder: Path, shape: str, num_problems: int, prompt_tokens: int) -> Path:
    """Write problems whose prompts are random words."""
    rng = random.Random(0)
    file = folder / f"problems-{shape}-{num_problems}-{prompt_tokens}.jsonl"
    size = vocabulary_size(shape)
    with file.open("w") as out:
        for _ in range(num_problems):
            words = " ".join(f"w{rng.randrange(2, size)}" for _ in range(prompt_tokens))
            out.write(json.dumps({"prompt": words, "ground_truth": "0"}) + "\n")
    return file


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl that describe a training step."""
    if not file.is_file():
        return []
    complete = [line for line in file.read_text().splitlines() if line.endswith("}")]
    return [line for line in map(json.loads, complete) if "step_s" in line]


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    """Run `postgrad train grpo` for a few steps and return median seconds, memory and gap."""
    folder = Path(args.folder)
    model = make_model(folder, args.shape)
    data = make_data(folder, args.shape, 4 * args.problems, args.prompt)
    runs = Path(tempfile.mkdtemp(dir=folder))
    overrides = [
        f"model.path={model}",
        f"data.train={data}",
        "data.template=plain",
        f"data.max_prompt_tokens={args.prompt}",
        f"reward.verifier={HERE / 'compare_common.py'}:length_reward",
        f"rollout.samples={args.samples}",
        f"rollout.max_response_tokens={args.tokens}",
        f"training.problems_per_step={args.problems}",
        "training.steps=1000",
        "training.checkpoint_every=1000",
        f"runs={runs}",
        "name=run",
        *args.overrides,
    ]
    if not any(word.startswith("optimizer.kind=") for word in overrides):
        overrides.append("optimizer.kind=adamw_fused")
    log = (runs / "log").open("w")
    start = time.monotonic()
    start_seconds = 0.0  # until the first step has ended
    child = subprocess.Popen(
        [sys.executable, "-m", "postgrad.cli.main", "train", "grpo", *overrides],
        stdout=log,
        stderr=log,
    )
    wanted = args.warmup + args.steps
    metrics = runs / "run" / "metrics.jsonl"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run does not survive it
    try:
        while child.poll() is None and (done := len(read_steps(metrics))) < wanted:
            if done and not start_seconds:
                start_seconds = round(time.monotonic() - start, 1)
            if time.monotonic() - start > args.limit_s:
                break
            time.sleep(0.2)
        ended = child.poll()
    finally:
        child.kill()
        child.wait()
        log.close()
    lines = read_steps(metrics)
    if len(lines) <= args.warmup:
        tail = (runs / "log").read_text()[-2500:]
        reason = "time limit" if ended is None else f"exit code {ended}"
        return {"failed": reason, "steps": len(lines), "log": tail}
    steady = lines[args.warmup :]
    stages = {key for key in steady[0] if key.startswith("stage/")}
    return {
        "step_s": statistics.median(line["step_s"] for line in steady),
        "memory_gib": max(line["memory_gib"] for line in steady),
        "gap_mean": max(line.get("engine/gap_mean", 0.0) for line in steady),
        "gap_max": max(line.get("engine/gap_max", 0.0) for line in steady),
        "first_step_s": lines[0]["step_s"],
        "stages": {
            key: round(statistics.median(line[key] for line in steady), 2)
            for key in sorted(stages)
            if statistics.median(line[key] for line in steady) >= 0.01
        },
        "steps": len(steady),
        "start_s": start_seconds,
    }


def measure_rollout(args: argparse.Namespace) -> dict[str, Any]:
    """Time the native engine alone: tokens per second with log-probs, and peak memory."""
    from postgrad.config.schema import ModelConfig, RolloutConfig
    from postgrad.model.device import choose_device, peak_memory_bytes, synchronize
    from postgrad.model.load.load import load
    from postgrad.rollout.engine import Request, Sampling
    from postgrad.rollout.native.engine import NativeEngine

    model = make_model(Path(args.folder), args.shape)
    device = choose_device("auto")
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    loaded = load(ModelConfig(path=str(model), dtype=dtype), device)
    engine = NativeEngine(loaded, RolloutConfig(max_rows=args.rows))
    rng = random.Random(0)
    requests: list[Request] = []
    for first in range(0, args.rows, args.samples):
        prompt = [rng.randrange(2, vocabulary_size(args.shape)) for _ in range(args.prompt)]
        requests.append(Request(prompt, list(range(first, first + args.samples))))
    seconds: list[float] = []
    for _ in range(1 + args.steps):
        synchronize(device)
        start = time.perf_counter()
        engine.generate(requests, Sampling(1.0, args.tokens))
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:])
    if args.profile:
        print_kernels(lambda: engine.generate(requests, Sampling(1.0, min(64, args.tokens))))
    return {
        "tokens_per_second": args.rows * args.tokens / best,
        "seconds": best,
        "first_seconds": seconds[0],
        "memory_gib": peak_memory_bytes(device) / 2**30,
    }


def print_kernels(work: Callable[[], object]) -> None:
    """Print the GPU kernels that took longest in one call of `work`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25)
    print(table, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("work", choices=("step", "rollout"))
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="rollout: rows in all")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per response")
    parser.add_argument("--prompt", type=int, default=100, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=2, help="measured steps after the warm-up")
    parser.add_argument("--warmup", type=int, default=1, help="step: steps that do not count")
    parser.add_argument("--profile", action="store_true", help="rollout: print GPU kernels")
    parser.add_argument("--limit-s", type=float, default=240.0, dest="limit_s")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("overrides", nargs="*", help="step: further key=value settings")
    args = parser.parse_intermixed_args()
    result = measure_step(args) if args.work == "step" else measure_rollout(args)
    print(json.dumps({"work": args.work, "shape": args.shape, **result}), flush=True)


if __name__ == "__main__":
    main()
