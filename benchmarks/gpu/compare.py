"""Postgrad beside its peers on one GPU, in one call: rollouts, a GRPO step, learning to add, updates. Prints figures and ratios.

    python benchmarks/gpu/compare.py rollout step learn update --model SMOLLM2 --gsm8k TRAIN_JSONL [--peers trl vllm hf]

SMOLLM2 is a folder of SmolLM2-135M-Instruct. Each contender runs in a process of its own, one after the other; the first repetition is
warm-up. Peers that are not installed are left out, and said so.
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
PROMPTS, SAMPLES, TOKENS = 64, 16, 256
BANDWIDTH, ARITHMETIC = (
    4.3e12,
    790e12,
)  # bytes and bfloat16 operations a second that an H200 was seen to reach
ASK = "\nReason step by step, and put the final answer in \\boxed{}."


def length_reward(response: str, problem: object) -> float:
    """A reward that differs within every group, so that no contender can skip a row."""
    return len(response) % 7 / 7


def report(name: str, **figures: float | str) -> None:
    """One line for people, one that the parent reads."""
    print("RESULT " + json.dumps({"name": name, **figures}), flush=True)


# ---- programs that run in a process of their own


def shapes(kit: Path, smollm2: str, which: str) -> str:
    """The folder of a model; `qwen1.5b` is Qwen2.5-1.5B's shape with random weights."""
    if which == "smollm2":
        return smollm2
    folder = kit / "qwen1.5b"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

        shape = Qwen2Config(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=2,
        )  # fmt: skip
        with torch.device("cuda"):
            model = Qwen2ForCausalLM(shape).to(torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return str(folder)


def sums() -> list[dict]:
    """Two-digit additions, the same for every contender."""
    import random

    rng, rows = random.Random(0), []
    for _ in range(4000):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        ask = f"What is {a} + {b}? Put the final answer in \\boxed{{}}."
        rows.append({"prompt": [{"role": "user", "content": ask}], "truth": str(a + b)})
    return rows


def peak_gib() -> float:
    """Most memory of the GPU that this process held, recordings included."""
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


def limits(long_tail: bool) -> list[int]:
    """Tokens of each row: all alike, or most under 200 and one in twenty 2,048."""
    import random

    random.seed(1)
    rows = PROMPTS * SAMPLES
    return (
        [2048 if random.random() < 0.05 else random.randrange(20, 200) for _ in range(rows)]
        if long_tail
        else [TOKENS] * rows
    )


def rollout_postgrad(folder: str, which: str, long_tail: bool) -> None:
    import torch

    from postgrad.config.schema import ModelConfig, RolloutConfig
    from postgrad.model.load import load
    from postgrad.rollout.engine import Request, Sampling
    from postgrad.rollout.native.engine import NativeEngine

    began = time.time()
    engine = NativeEngine(
        load(ModelConfig(path=folder, dtype="bfloat16"), torch.device("cuda")),
        RolloutConfig(max_rows=1024),
    )
    assert engine.decoder is not None
    engine.decoder.stop_ids = torch.tensor(
        [1 << 30], dtype=torch.int32, device="cuda"
    )  # rows run to their limit
    wanted = limits(long_tail)
    if long_tail:
        requests = [
            Request(p, [i], wanted[i])
            for i, p in enumerate(p for p in random_prompts() for _ in range(SAMPLES))
        ]
    else:
        requests = [
            Request(p, list(range(i * SAMPLES, (i + 1) * SAMPLES)))
            for i, p in enumerate(random_prompts())
        ]
    seconds = []
    for number in range(3):
        torch.cuda.synchronize()
        start = time.time()
        engine.generate(requests, Sampling(1.0, max(wanted)))
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
        if number == 0:
            report("start", seconds=time.time() - began)
    speed = sum(wanted) / min(seconds)
    config = engine.model.config
    cache = (
        4
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.hidden_size
        // config.num_attention_heads
    )
    weights = 2 * sum(p.numel() for p in engine.model.parameters())
    # Bytes that a token's share of the steps must read: every row's cache as far as it goes, and the weights once for 1,024 rows.
    read = [
        cache * (len(p) + n / 2) * n
        for p, n in zip((p for p in random_prompts() for _ in range(SAMPLES)), wanted, strict=True)
    ]
    bytes_needed = sum(read) + weights * max(wanted)
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
                input_ids=ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, temperature=1.0,
                top_k=0, pad_token_id=0,
            )  # fmt: skip
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
        wanted = limits(long_tail)
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in wanted
        ]
        seconds = []
        for _ in range(2):
            start = time.time()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.time() - start)
        report(
            "vllm",
            work=f"rollout {which}{' long tail' if long_tail else ''}",
            tokens_per_second=sum(wanted) / min(seconds),
        )


def trl_run(folder: str, gsm8k: str, learn: bool) -> None:
    """TRL with transformers.generate: seconds a step, or seconds until 80% of sampled sums are right."""
    import re

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    began, state = time.time(), {"start": 0.0, "steps": [], "right": []}

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["start"] = time.time()

        def on_step_end(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["steps"].append(time.time() - state["start"])
            if learn and len(state["right"]) >= 5 and statistics.mean(state["right"][-5:]) >= 0.8:
                control.should_training_stop = True

    def right(completions, truth, **kwargs):
        found = [re.findall(r"boxed\{([^}]*)\}", c[0]["content"]) for c in completions]
        values = [
            float(bool(b) and b[-1].strip() == t) + 0.1 * bool(b and b[-1].strip())
            for b, t in zip(found, truth, strict=True)
        ]
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
            **common, per_device_train_batch_size=256, gradient_accumulation_steps=2, num_generations=16, max_completion_length=64,
            max_steps=90, learning_rate=2e-5, lr_scheduler_type="constant", gradient_checkpointing=False,
        )  # fmt: skip
    else:
        questions = [json.loads(line)["question"] for line in Path(gsm8k).read_text().splitlines()][
            :2000
        ]
        rows = [{"prompt": [{"role": "user", "content": q + ASK}]} for q in questions]
        config = GRPOConfig(
            **common, per_device_train_batch_size=64, gradient_accumulation_steps=16, num_generations=16, max_completion_length=256,
            max_steps=3, learning_rate=1e-6, gradient_checkpointing=False,
        )  # fmt: skip
    dtype = torch.float32 if learn else torch.bfloat16
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=[right if learn else by_length], args=config, train_dataset=Dataset.from_list(rows), callbacks=[Watch()],
    ).train()  # fmt: skip
    peak = torch.cuda.max_memory_allocated() / 2**30
    if learn:
        report(
            "trl",
            work="learn",
            seconds=time.time() - began,
            steps=len(state["steps"]),
            right=state["right"][-1],
        )
    else:
        report("trl", work="step", seconds=statistics.median(state["steps"][1:]), peak_gib=peak)


def train_postgrad(folder: str, gsm8k: str, learn: bool, more: list[str]) -> None:
    """`postgrad train` with the same model, prompts, batch and rate; `more` are further key=value words."""
    runs = tempfile.mkdtemp()
    data = Path(runs) / "questions.jsonl"
    if learn:
        rows = [
            {"prompt": row["prompt"], "reward_model": {"ground_truth": row["truth"]}}
            for row in sums()
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "sums"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}", f"reward.verifier={HERE.parent / 'research.py'}:boxed_sum", "rollout.samples=16",
            "training.problems_per_step=32", "rollout.max_response_tokens=64", "optimizer.lr=2e-5", "optimizer.weight_decay=0",
            "training.steps=90",
        ]  # fmt: skip
    else:
        lines = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()][:2000]
        rows = [
            {
                "prompt": [{"role": "user", "content": line["question"] + ASK}],
                "reward_model": {"ground_truth": "0"},
            }
            for line in lines
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "gsm8k"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}", f"reward.verifier={HERE / 'compare.py'}:length_reward", "rollout.samples=16",
            "training.problems_per_step=64", "rollout.max_response_tokens=256", "optimizer.lr=1e-6", "training.steps=6",
        ]  # fmt: skip
    began = time.time()
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
        lines = (
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            if file.exists()
            else []
        )
        rights = [line["reward/right"] for line in lines if "reward/right" in line]
        if learn and len(rights) >= 5 and statistics.mean(rights[-5:]) >= 0.8:
            report(
                "postgrad",
                work="learn",
                seconds=time.time() - began,
                steps=len(rights),
                right=rights[-1],
            )
            child.terminate()
            child.wait()
            return
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if learn:
        report(
            "postgrad",
            work="learn",
            seconds=time.time() - began,
            steps=len(lines),
            right=lines[-1].get("reward/right", 0.0),
        )
        return
    lines = [line for line in lines if "step_s" in line][2:]
    stages = {
        k: round(statistics.median(line[k] for line in lines), 3)
        for k in lines[0]
        if k.startswith("stage/")
    }
    gap = max(line.get("engine/gap_max", 0.0) for line in lines)
    seconds, peak = (
        statistics.median(line["step_s"] for line in lines),
        max(line["memory_gib"] for line in lines),
    )
    report(
        "postgrad",
        work="step",
        seconds=seconds,
        peak_gib=peak,
        gap_max=gap,
        stages=json.dumps(stages),
    )


def our_policy(folder: str, recipe: str, overrides: list[str]):
    """The policy of a run with these words, in bfloat16."""
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
    """One update of the whole policy, and of the one after a quarter of its blocks (BuPO's first phase)."""
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
        policy = our_policy(folder, recipe, [*overrides, *more])
        times = []
        for _ in range(4):
            torch.cuda.synchronize()

            start = time.time()
            policy.update(batch, 1)
            torch.cuda.synchronize()
            times.append(time.time() - start)
        seconds[name] = min(times)
        used = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
        peak = peak_gib()
        report(
            "postgrad",
            work=f"update {name}",
            seconds=seconds[name],
            tokens_per_second=batch.num_tokens / seconds[name],
            share_of_arithmetic=6 * used * batch.num_tokens / seconds[name] / ARITHMETIC,
            peak_gib=peak,
        )
    report(
        "postgrad",
        work="update quarter against full",
        times_as_fast=seconds["full"] / seconds["quarter"],
    )


def both_ways_hf(folder: str) -> None:
    """Forward and backward of 64 x 384 tokens by transformers with sdpa, logits whole; a peer of `update full`, without the optimizer."""
    import torch
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        .cuda()
        .train()
    )
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


def both_ways_postgrad(folder: str) -> None:
    """The same rows through our passes, recorded as in training: every token predicted, log-probs and entropy; no optimizer step."""
    import random

    import torch

    from postgrad.model.passes.layout import make_micro_batches
    from postgrad.model.views import FULL
    from postgrad.types import Batch, Trajectory

    random.seed(0)
    policy, device = our_policy(folder, "grpo", []), torch.device("cuda")
    model = policy.model
    numbers = [[random.randrange(10, 40000) for _ in range(385)] for _ in range(64)]
    batch = Batch.of(
        [Trajectory(str(i), row[:1], row[1:], group=i) for i, row in enumerate(numbers)]
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


# ---- the parent


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
        help="key=value words for Postgrad's own runs, e.g. training.token_budget=12288",
    )
    options = parser.parse_args()
    peers = [
        p for p in options.peers if importlib.util.find_spec("transformers" if p == "hf" else p)
    ]
    if left_out := set(options.peers) - set(peers):
        print(f"not installed, left out: {', '.join(sorted(left_out))}")
    calls: list[str] = []
    kit = Path(tempfile.gettempdir()) / "postgrad-compare"
    if "rollout" in options.what:
        for which in options.shapes:
            folder = f"shapes(Path({str(kit)!r}), {options.model!r}, {which!r})"
            calls += [f"rollout_postgrad({folder}, {which!r}, {tail})" for tail in (False, True)]
            calls += [f"rollout_vllm({folder}, {which!r})"] if "vllm" in peers else []
            calls += [f"rollout_hf({folder}, {which!r})"] if "hf" in peers else []
    for what, learn in (("step", False), ("learn", True)):
        if what in options.what:
            calls.append(
                f"train_postgrad({options.model!r}, {options.gsm8k!r}, {learn}, {options.set!r})"
            )
            calls += (
                [f"trl_run({options.model!r}, {options.gsm8k!r}, {learn})"]
                if "trl" in peers
                else []
            )
    if "update" in options.what:
        calls += [
            f"update_views({options.model!r}, {options.set!r})",
            f"both_ways_postgrad({options.model!r})",
        ]
        calls += [f"both_ways_hf({options.model!r})"] if "hf" in peers else []
    found: dict[str, dict[str, dict]] = {}
    for call in calls:
        program = f"import sys; sys.path.insert(0, {str(HERE)!r}); from compare import *; {call}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if done.returncode:
            print(f"{call} failed: {done.stderr.strip()[-400:]}", flush=True)
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                figures = json.loads(line.removeprefix("RESULT "))
                print(
                    " ".join(
                        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                        for k, v in figures.items()
                    ),
                    flush=True,
                )
                found.setdefault(str(figures.get("work")), {})[figures["name"]] = figures
    for work, contenders in found.items():
        ours = contenders.get("postgrad")
        for name, theirs in contenders.items():
            if ours and name != "postgrad" and work != "None":
                faster = (
                    theirs["seconds"] / ours["seconds"]
                    if "seconds" in ours
                    else ours["tokens_per_second"] / theirs["tokens_per_second"]
                )
                print(f"RATIO {work}: postgrad is {faster:.1f} times as fast as {name}", flush=True)


if __name__ == "__main__":
    main()
