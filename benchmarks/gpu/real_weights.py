"""A real model on one GPU: greedy text beside transformers', engine-trainer gap, rollout speed.

    python benchmarks/gpu/real_weights.py --model FOLDER
    python benchmarks/gpu/real_weights.py --model smollm2 --device cpu --tokens 16 --rows 8

Prints one JSON line per type. Ends with exit code 1 if a greedy text in float32 differs from the
text of transformers' `generate`. In bfloat16 two passes may round the two best tokens differently,
so for each text that differs the line says how far apart the two tokens were at the first
difference.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.model.device import peak_memory_bytes
from postgrad.model.load import load, stop_ids
from postgrad.model.loaded import Loaded
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.types import Batch, Trajectory

PROMPTS = (
    "The capital of France is",
    "Question: Tom has 3 boxes with 12 pens and gives away 7 pens. How many are left?\nAnswer:",
    "def fibonacci(n):\n    ",
    "Die drei Grundfarben sind",
    "1, 1, 2, 3, 5, 8,",
    "Write one sentence about the sea.",
    "import numpy as np\n\n# the mean of each column\n",
    "Q: What is 17 * 23?\nA: Let us compute it step by step.",
    "Once upon a time",
    "SELECT name FROM",
    "El agua hierve a",
    "A triangle has sides 3, 4 and 5. Its area is",
    '{"name": "Ada", "age":',
    "The opposite of hot is cold. The opposite of up is",
    "To sort a list in Python,",
    "Solve for x: 3x + 5 = 20.",
)


def encode_prompts(loaded: Loaded) -> list[list[int]]:
    """Return the prompts as tokens, through the chat template if the model has one."""
    tokenizer = loaded.tokenizer
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def load_policy(args: argparse.Namespace, dtype: str) -> LocalPolicy:
    """Return the policy that `postgrad train grpo` would train."""
    settings = [
        f"model.path={args.model}",
        "data.train=arithmetic:1",
        f"model.device={args.device}",
        f"model.dtype={dtype}",
        "optimizer.kind=adamw" if args.device == "cpu" else "optimizer.kind=adamw_fused",
    ]
    config = compose("grpo", settings, lambda name: find_method(name).Settings)
    loaded = load(config.model, torch.device(args.device))
    return LocalPolicy(config, loaded, find_method("grpo")(config))


def make_engine(args: argparse.Namespace, policy: LocalPolicy) -> NativeEngine:
    rollout = policy.config.rollout
    rollout.max_rows = args.rows
    return NativeEngine(policy.loaded, rollout)


@torch.no_grad()
def compare_greedy(args: argparse.Namespace, policy: LocalPolicy) -> dict[str, Any]:
    """Return how many greedy texts equal those of `generate`, and where the others part."""
    loaded = policy.loaded
    engine = make_engine(args, policy)
    prompts = encode_prompts(loaded)
    requests = [Request(prompt, [i]) for i, prompt in enumerate(prompts)]
    ours = [c[0].tokens for c in engine.generate(requests, Sampling(0.0, args.tokens))]
    equal = 0
    differences = []
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt], device=args.device)
        theirs = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=1.0,
            max_new_tokens=args.tokens,
            eos_token_id=stop_ids(loaded),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        if tokens == theirs:
            equal += 1
            continue
        pairs = zip(tokens, theirs, strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        context = torch.tensor([prompt + theirs[:first]], device=args.device)
        logits = loaded.model(context, use_cache=False).logits[0, -1].float()
        margin = float(logits[theirs[first]] - logits[tokens[first]])
        differences.append({"token": first, "margin": round(margin, 4)})
    return {"equal": equal, "of": len(prompts), "differences": differences}


def measure_gap(args: argparse.Namespace, policy: LocalPolicy) -> dict[str, float]:
    """Return the gap of sampled log-probs to the trainer's, and the engine's speed."""
    engine = make_engine(args, policy)
    prompts = encode_prompts(policy.loaded)
    samples = max(1, args.rows // len(prompts))
    requests = [
        Request(prompt, list(range(i * samples, (i + 1) * samples)))
        for i, prompt in enumerate(prompts)
    ]
    sampling = Sampling(1.0, args.speed_tokens)
    engine.generate(requests, sampling)  # captures graphs
    start = time.perf_counter()
    groups = engine.generate(requests, sampling)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(c.tokens) for group in groups for c in group)
    rows = []
    sampled: list[float] = []
    for number, (request, group) in enumerate(zip(requests, groups, strict=True)):
        for index, done in enumerate(group):
            rows.append(Trajectory(str(number), request.prompt, done.tokens, number, index))
            sampled += done.logprobs
    gap = (policy.logprobs(Batch.of(rows))["logprobs"].cpu() - torch.tensor(sampled)).abs()
    return {
        "rows": samples * len(prompts),
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds, 1),
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument("--rows", type=int, default=256, help="rows for gap and speed")
    parser.add_argument("--speed-tokens", type=int, default=256, dest="speed_tokens")
    args = parser.parse_args()
    num_equal: dict[str, int] = {}
    for dtype in ("float32", "bfloat16"):
        policy = load_policy(args, dtype)
        greedy = compare_greedy(args, policy)
        num_equal[dtype] = greedy["equal"]
        result = {"model": args.model, "dtype": dtype, "greedy": greedy}
        result["sampled"] = measure_gap(args, policy)
        result["memory_gib"] = round(peak_memory_bytes(policy.device) / 2**30, 1)
        print(json.dumps(result), flush=True)
        del policy
    return int(num_equal["float32"] < len(PROMPTS))


if __name__ == "__main__":
    sys.exit(main())
