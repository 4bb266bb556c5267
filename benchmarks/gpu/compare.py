"""Postgrad and other systems on one GPU: rollouts, a GRPO step, learning to add, updates.

    python benchmarks/gpu/compare.py rollout step learn update --model SMOLLM2
                                     --gsm8k TRAIN_JSONL [--peers trl vllm hf]

SMOLLM2 is a folder of SmolLM2-135M-Instruct. Each system runs in its own process, one after the
other; the first repetition is warm-up. Prints figures and ratios. Peers that are not installed are
listed and left out.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPTS = 64
SAMPLES = 16
TOKENS = 256
# Measured on an H200: bytes per second, and bfloat16 operations per second.
BANDWIDTH = 4.3e12
ARITHMETIC = 790e12
INSTRUCTION = "\nReason step by step, and put the final answer in \\boxed{}."


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group, so that no system can skip a row."""
    return len(response) % 7 / 7


def report(name: str, **figures: float | str) -> None:
    """Print one line of figures that the parent process reads."""
    print("RESULT " + json.dumps({"name": name, **figures}), flush=True)


# ---- functions that run in their own process


def model_folder(cache: Path, smollm2: str, which: str) -> str:
    """Return a model's folder; `qwen1.5b` has Qwen2.5-1.5B's shape and random weights."""
    if which == "smollm2":
        return smollm2
    folder = cache / "qwen1.5b"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=2,
        )
        with torch.device("cuda"):
            model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return str(folder)


def sums() -> list[dict]:
    """Return two-digit additions, the same for every system."""
    import random

    rng = random.Random(0)
    rows = []
    for _ in range(4000):
        a = rng.randrange(10, 100)
        b = rng.randrange(10, 100)
        question = f"What is {a} + {b}? Put the final answer in \\boxed{{}}."
        rows.append({"prompt": [{"role": "user", "content": question}], "truth": str(a + b)})
    return rows


def peak_gib() -> float:
    """Return the peak GPU memory of this process, including captured graphs."""
    import torch

    from postgrad.model.device import peak_memory_bytes

    return peak_memory_bytes(torch.device("cuda")) / 2**30


def random_prompts() -> list[list[int]]:
    import random

    random.seed(0)
    return [
        [random.randrange(10, 40000) for _ in range(random.randrange(80, 200))]
        for _ in range(PROMPTS)
    ]


def response_lengths(long_tail: bool) -> list[int]:
    """Return the tokens of each row: all equal, or most under 200 and one in twenty 2,048."""
    import random

    random.seed(1)
    rows = PROMPTS * SAMPLES
    if not long_tail:
        return [TOKENS] * rows
    return [2048 if random.random() < 0.05 else random.randrange(20, 200) for _ in range(rows)]


def rollout_postgrad(folder: str, which: str, long_tail: bool) -> None:
    import torch

    from postgrad.config.schema import ModelConfig, RolloutConfig
    from postgrad.model.load import load
    from postgrad.rollout.engine import Request, Sampling
    from postgrad.rollout.native.engine import NativeEngine

    load_start = time.time()
    engine = NativeEngine(
        load(ModelConfig(path=folder, dtype="bfloat16"), torch.device("cuda")),
        RolloutConfig(max_rows=1024),
    )
    assert engine.decoder is not None
    # No token stops a row, so all rows have their full length.
    engine.decoder.stop_ids = torch.tensor([1 << 30], dtype=torch.int32, device="cuda")
    lengths = response_lengths(long_tail)
    prompts = [prompt for prompt in random_prompts() for _ in range(SAMPLES)]
    if long_tail:
        requests = [Request(prompt, [i], lengths[i]) for i, prompt in enumerate(prompts)]
    else:
        requests = [
            Request(p, list(range(i * SAMPLES, (i + 1) * SAMPLES)))
            for i, p in enumerate(random_prompts())
        ]
    seconds = []
    for number in range(3):
        torch.cuda.synchronize()
        start = time.time()
        engine.generate(requests, Sampling(1.0, max(lengths)))
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
        if number == 0:
            report("start", seconds=time.time() - load_start)
    speed = sum(lengths) / min(seconds)
    config = engine.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cache_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = 2 * sum(p.numel() for p in engine.model.parameters())
    # Each step must read the cache of every row up to its position, and all weights once.
    bytes_needed = weights * max(lengths)
    for prompt, length in zip(prompts, lengths, strict=True):
        bytes_needed += cache_bytes * (len(prompt) + length / 2) * length
    report(
        "postgrad",
        work=f"rollout {which}{' long tail' if long_tail else ''}",
        tokens_per_second=speed,
        share_of_bandwidth=bytes_needed / min(seconds) / BANDWIDTH,
        peak_gib=peak_gib(),
    )


def rollout_hf(folder: str, which: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    prompts = random_prompts()
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, PROMPTS * SAMPLES, width, dtype=torch.long, device="cuda")
    for row in range(len(ids)):
        prompt = prompts[row // SAMPLES]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.time()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    report(
        "transformers", work=f"rollout {which}", tokens_per_second=len(ids) * TOKENS / min(seconds)
    )


def rollout_vllm(folder: str, which: str) -> None:
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        folder, dtype="bfloat16", gpu_memory_utilization=0.6, max_model_len=2560, max_num_seqs=1024
    )
    prompts = [{"prompt_token_ids": p} for p in random_prompts() for _ in range(SAMPLES)]
    for long_tail in (False, True):
        lengths = response_lengths(long_tail)
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in lengths
        ]
        seconds = []
        for _ in range(2):
            start = time.time()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.time() - start)
        report(
            "vllm",
            work=f"rollout {which}{' long tail' if long_tail else ''}",
            tokens_per_second=sum(lengths) / min(seconds),
        )


def trl_run(folder: str, gsm8k: str, learn: bool) -> None:
    """Run TRL with transformers.generate: seconds per step, or until 80% of sums are right."""
    import re

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    run_start = time.time()
    state = {"start": 0.0, "steps": [], "right": []}

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["start"] = time.time()

        def on_step_end(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["steps"].append(time.time() - state["start"])
            if learn and len(state["right"]) >= 5 and statistics.mean(state["right"][-5:]) >= 0.8:
                control.should_training_stop = True

    def right(completions, truth, **kwargs):
        values = []
        for completion, answer in zip(completions, truth, strict=True):
            boxes = re.findall(r"boxed\{([^}]*)\}", completion[0]["content"])
            boxed = boxes[-1].strip() if boxes else ""
            values.append(float(boxed == answer) + 0.1 * bool(boxed))
        state["right"].append(statistics.mean(float(v >= 1) for v in values))
        return values

    def by_length(completions, **kwargs):
        return [length_reward(c[0]["content"], None) for c in completions]

    common = {
        "output_dir": tempfile.mkdtemp(),
        "temperature": 1.0,
        "bf16": True,
        "report_to": "none",
        "beta": 0.0,
        "save_strategy": "no",
    }
    if learn:
        rows = sums()
        config = GRPOConfig(
            **common,
            per_device_train_batch_size=256,
            gradient_accumulation_steps=2,
            num_generations=16,
            max_completion_length=64,
            max_steps=90,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
        )
    else:
        lines = Path(gsm8k).read_text().splitlines()[:2000]
        questions = [json.loads(line)["question"] for line in lines]
        rows = [{"prompt": [{"role": "user", "content": q + INSTRUCTION}]} for q in questions]
        config = GRPOConfig(
            **common,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=16,
            num_generations=16,
            max_completion_length=256,
            max_steps=3,
            learning_rate=1e-6,
            gradient_checkpointing=False,
        )
    dtype = torch.float32 if learn else torch.bfloat16
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=[right if learn else by_length],
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Timer()],
    ).train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    if learn:
        report(
            "trl",
            work="learn",
            seconds=time.time() - run_start,
            steps=len(state["steps"]),
            right=state["right"][-1],
        )
    else:
        report("trl", work="step", seconds=statistics.median(state["steps"][1:]), peak_gib=peak)


def train_postgrad(folder: str, gsm8k: str, learn: bool, more: list[str]) -> None:
    """Run `postgrad train` as trl_run runs TRL; `more` are further key=value overrides."""
    runs = tempfile.mkdtemp()
    data = Path(runs) / "questions.jsonl"
    if learn:
        rows = [
            {"prompt": row["prompt"], "reward_model": {"ground_truth": row["truth"]}}
            for row in sums()
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "sums"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}",
            f"reward.verifier={HERE.parent / 'research.py'}:boxed_sum",
            "rollout.samples=16",
            "training.problems_per_step=32",
            "rollout.max_response_tokens=64",
            "optimizer.lr=2e-5",
            "optimizer.weight_decay=0",
            "training.steps=90",
        ]
    else:
        lines = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()][:2000]
        rows = [
            {
                "prompt": [{"role": "user", "content": line["question"] + INSTRUCTION}],
                "reward_model": {"ground_truth": "0"},
            }
            for line in lines
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "gsm8k"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}",
            f"reward.verifier={HERE / 'compare.py'}:length_reward",
            "rollout.samples=16",
            "training.problems_per_step=64",
            "rollout.max_response_tokens=256",
            "optimizer.lr=1e-6",
            "training.steps=6",
        ]
    run_start = time.time()
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "train",
        "grpo",
        f"model.path={folder}",
        *overrides,
        *more,
        f"runs={runs}",
        "name=run",
    ]
    child = subprocess.Popen(
        [*command, "optimizer.kind=adamw_fused", "training.checkpoint_every=1000"],
        stdout=subprocess.DEVNULL,
    )
    file = Path(runs) / "run" / "metrics.jsonl"
    while child.poll() is None:
        time.sleep(0.2)
        written = file.read_text().splitlines() if file.exists() else []
        lines = [json.loads(line) for line in written if line.endswith("}")]
        accuracies = [line["reward/right"] for line in lines if "reward/right" in line]
        if learn and len(accuracies) >= 5 and statistics.mean(accuracies[-5:]) >= 0.8:
            report(
                "postgrad",
                work="learn",
                seconds=time.time() - run_start,
                steps=len(accuracies),
                right=accuracies[-1],
            )
            child.terminate()
            child.wait()
            return
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if learn:
        report(
            "postgrad",
            work="learn",
            seconds=time.time() - run_start,
            steps=len(lines),
            right=lines[-1].get("reward/right", 0.0),
        )
        return
    lines = [line for line in lines if "step_s" in line][2:]
    stages = {
        name: round(statistics.median(line[name] for line in lines), 3)
        for name in lines[0]
        if name.startswith("stage/")
    }
    report(
        "postgrad",
        work="step",
        seconds=statistics.median(line["step_s"] for line in lines),
        peak_gib=max(line["memory_gib"] for line in lines),
        gap_max=max(line.get("engine/gap_max", 0.0) for line in lines),
        stages=json.dumps(stages),
    )


def make_policy(folder: str, recipe: str, overrides: list[str]):
    """Return the policy of a run with these overrides, in bfloat16."""
    import torch

    from postgrad.config.compose import compose
    from postgrad.config.schema import ModelConfig
    from postgrad.methods import find_method
    from postgrad.model.load import load
    from postgrad.model.policy import LocalPolicy

    fixed = [
        "data.train=arithmetic:1",
        "model.device=cuda",
        "model.dtype=bfloat16",
        "optimizer.kind=adamw_fused",
    ]
    config = compose(
        recipe, [f"model.path={folder}", *fixed, *overrides], lambda m: find_method(m).Settings
    )
    loaded = load(ModelConfig(path=folder, dtype="bfloat16"), torch.device("cuda"))
    return LocalPolicy(config, loaded, find_method(recipe)(config))


def update_views(folder: str, more: list[str]) -> None:
    """Time one update of the full policy and of the one after a quarter of its blocks (BuPO)."""
    import random

    import torch

    from postgrad.types import Batch, Trajectory

    random.seed(0)
    prompts = random_prompts()
    rows = [
        Trajectory(str(i), p, [random.randrange(10, 40000) for _ in range(224)], group=i)
        for i, p in enumerate(prompts)
        for _ in range(SAMPLES)
    ]
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.randn(batch.num_tokens)
    seconds = {}
    for name, recipe, overrides in (
        ("full", "grpo", []),
        ("quarter", "bupo", ["method.num_blocks=7", "method.phase_one_steps=50"]),
    ):
        policy = make_policy(folder, recipe, [*overrides, *more])
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.time()
            policy.update(batch, 1)
            torch.cuda.synchronize()
            times.append(time.time() - start)
        seconds[name] = min(times)
        num_trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
        report(
            "postgrad",
            work=f"update {name}",
            seconds=seconds[name],
            tokens_per_second=batch.num_tokens / seconds[name],
            share_of_arithmetic=6 * num_trained * batch.num_tokens / seconds[name] / ARITHMETIC,
            peak_gib=peak_gib(),
        )
    report(
        "postgrad",
        work="update quarter against full",
        times_as_fast=seconds["full"] / seconds["quarter"],
    )


def forward_backward_hf(folder: str) -> None:
    """Time forward and backward of 64 x 384 tokens in transformers, with sdpa and full logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.cuda().train()
    ids = torch.randint(10, 40000, (64, 384), device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.time()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    report(
        "transformers",
        work="forward and backward",
        tokens_per_second=ids.numel() / min(seconds),
        peak_gib=peak,
    )


def forward_backward_postgrad(folder: str) -> None:
    """Time the same rows in our captured passes, without an optimizer step."""
    import random

    import torch

    from postgrad.model.passes.layout import make_micro_batches
    from postgrad.model.views import FULL
    from postgrad.types import Batch, Trajectory

    random.seed(0)
    policy = make_policy(folder, "grpo", [])
    device = torch.device("cuda")
    model = policy.model
    token_rows = [[random.randrange(10, 40000) for _ in range(385)] for _ in range(64)]
    batch = Batch.of(
        [Trajectory(str(i), row[:1], row[1:], group=i) for i, row in enumerate(token_rows)]
    )
    passes = [
        (m.to(device), batch.select(m.rows).response.values.to(device))
        for m in make_micro_batches(batch, 0, model)
    ]
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.time()
        for m, targets in passes:
            policy.forward(m, targets, FULL).logprobs.mean().backward()
        policy.optimizer.adam.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    speed = batch.num_tokens / min(seconds)
    share = 6 * sum(p.numel() for p in model.parameters()) * speed / ARITHMETIC
    peak = peak_gib()
    report(
        "postgrad",
        work="forward and backward",
        tokens_per_second=speed,
        share_of_arithmetic=share,
        peak_gib=peak,
    )


# ---- the parent process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("rollout", "step", "learn", "update"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", default="../shared/data/gsm8k/train.jsonl")
    parser.add_argument("--peers", nargs="*", default=["trl", "vllm", "hf"])
    parser.add_argument("--shapes", nargs="*", default=["smollm2", "qwen1.5b"])
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        help="key=value overrides of Postgrad's runs, e.g. training.token_budget=12288",
    )
    options = parser.parse_args()
    peers = [peer for peer in options.peers if is_installed(peer)]
    missing = set(options.peers) - set(peers)
    if missing:
        print(f"not installed, left out: {', '.join(sorted(missing))}")
    results: dict[str, dict[str, dict]] = {}
    for call in plan_calls(options, peers):
        for figures in run_call(call):
            print(" ".join(f"{name}={format_value(v)}" for name, v in figures.items()), flush=True)
            results.setdefault(str(figures.get("work")), {})[figures["name"]] = figures
    print_ratios(results)


def is_installed(peer: str) -> bool:
    module = "transformers" if peer == "hf" else peer
    return importlib.util.find_spec(module) is not None


def plan_calls(options: argparse.Namespace, peers: list[str]) -> list[str]:
    """Return the calls of this file's functions, one per process."""
    calls: list[str] = []
    cache = Path(tempfile.gettempdir()) / "postgrad-compare"
    if "rollout" in options.what:
        for which in options.shapes:
            folder = f"model_folder(Path({str(cache)!r}), {options.model!r}, {which!r})"
            calls += [f"rollout_postgrad({folder}, {which!r}, {tail})" for tail in (False, True)]
            if "vllm" in peers:
                calls.append(f"rollout_vllm({folder}, {which!r})")
            if "hf" in peers:
                calls.append(f"rollout_hf({folder}, {which!r})")
    for what, learn in (("step", False), ("learn", True)):
        if what in options.what:
            arguments = f"{options.model!r}, {options.gsm8k!r}, {learn}"
            calls.append(f"train_postgrad({arguments}, {options.set!r})")
            if "trl" in peers:
                calls.append(f"trl_run({arguments})")
    if "update" in options.what:
        calls.append(f"update_views({options.model!r}, {options.set!r})")
        calls.append(f"forward_backward_postgrad({options.model!r})")
        if "hf" in peers:
            calls.append(f"forward_backward_hf({options.model!r})")
    return calls


def run_call(call: str) -> list[dict]:
    """Return the figures that one call reported from its own process."""
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); from compare import *; {call}"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if process.returncode:
        print(f"{call} failed: {process.stderr.strip()[-400:]}", flush=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def format_value(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_ratios(results: dict[str, dict[str, dict]]) -> None:
    for work, systems in results.items():
        ours = systems.get("postgrad")
        if ours is None or work == "None":
            continue
        for name, figures in systems.items():
            if name == "postgrad":
                continue
            if "seconds" in ours:
                speedup = figures["seconds"] / ours["seconds"]
            else:
                speedup = ours["tokens_per_second"] / figures["tokens_per_second"]
            print(f"RATIO {work}: postgrad is {speedup:.1f} times as fast as {name}", flush=True)


if __name__ == "__main__":
    main()
