"""The update of one GRPO step on one GPU, with random weights of Qwen3's shapes.

    python benchmarks/gpu/update.py --shape 4b --problems 4 --samples 8 --tokens 1024 --profile
    python benchmarks/gpu/update.py --shape 0.6b --problems 1 --samples 1 --tokens 16284
    python benchmarks/gpu/update.py --shape 4b ... model.lora.rank=16

Prints tokens per second of forward, backward and optimizer step, and peak memory. Encoder and
responses are random tokens; both count as tokens.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sizes import SHAPES, make_model, print_kernels, vocabulary_size

from postgrad.cluster.host import load_policy
from postgrad.config.compose import compose
from postgrad.errors import RunError
from postgrad.methods import find_method
from postgrad.model.device import peak_memory_bytes, synchronize
from postgrad.model.policy import LocalPolicy
from postgrad.training.resolve import resolve
from postgrad.types import Batch, Trajectory


def make_policy(args: argparse.Namespace) -> LocalPolicy:
    """Return the policy that `postgrad train grpo` would train with these settings."""
    overrides = [
        f"model.path={make_model(Path(args.folder), args.shape)}",
        "data.train=arithmetic:1",
        f"data.max_prompt_tokens={args.prompt}",
        f"rollout.samples={args.samples}",
        f"rollout.max_response_tokens={args.tokens}",
        f"training.problems_per_step={args.problems}",
        "name=update",
        *args.overrides,
    ]
    if not any(word.startswith("optimizer.kind=") for word in overrides):
        overrides.append("optimizer.kind=adamw_fused")
    config = resolve(compose("grpo", overrides, lambda name: find_method(name).Settings))
    method = find_method("grpo")(config)
    return LocalPolicy(config, load_policy(config, method), method.objective)


def make_batch(args: argparse.Namespace) -> Batch:
    """Return a batch of random tokens with random advantages."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, vocabulary_size(args.shape)) for _ in range(count)]

    rows: list[Trajectory] = []
    for problem in range(args.problems):
        prompt = tokens(args.prompt)
        for _ in range(args.samples):
            rows.append(Trajectory(str(problem), prompt, tokens(args.tokens), group=problem))
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.randn(batch.num_tokens)
    return batch


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, tokens per second and peak memory of the fastest measured update."""
    policy = make_policy(args)
    batch = make_batch(args)
    seconds: list[float] = []
    for step in range(1, 2 + args.steps):
        synchronize(policy.device)
        start = time.perf_counter()
        policy.update(batch, step)
        synchronize(policy.device)
        seconds.append(time.perf_counter() - start)
    if args.profile:
        print_kernels(lambda: policy.update(batch, 9))
    num_tokens = args.problems * (args.prompt + args.samples * args.tokens)
    best = min(seconds[1:] or seconds)
    return {
        "tokens": num_tokens,
        "update_s": best,
        "tokens_per_second": num_tokens / best,
        "first_s": seconds[0],
        "memory_gib": peak_memory_bytes(policy.device) / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per response")
    parser.add_argument("--prompt", type=int, default=100, help="tokens per prompt")
    parser.add_argument("--steps", type=int, default=2, help="measured updates after one warm-up")
    parser.add_argument("--profile", action="store_true", help="print GPU kernels")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("overrides", nargs="*", help="further key=value settings")
    args = parser.parse_intermixed_args()
    try:
        result = measure(args)
    except (torch.OutOfMemoryError, RunError) as error:
        result = {"failed": str(error).split("\n")[0][:200]}
    print(json.dumps({"shape": args.shape, **result}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
