"""Bytes and seconds of an update of a Qwen3-MoE on gloo ranks: three ways to hold the experts.

    FSDP2       every rank gathers all experts of a block
    tensor      each rank holds whole experts; all ranks of a group compute the same rows
    dispatch    each rank holds whole experts; tokens are sent to the ranks of their experts

Bytes are those that ranks send to each other during one update (tests/sent_bytes.py).

    python benchmarks/expert_dispatch.py
    python benchmarks/expert_dispatch.py --ranks 2 --width 32 --updates 1     a smoke test
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from families import save_family
from parallel import sharded_policy
from ranks import run_on_ranks
from sent_bytes import SentBytes
from tiny_runs import random_batch


def modes(num_ranks: int) -> dict[str, list[str]]:
    """Return the settings of the three ways."""
    expert = f"cluster.expert_parallel={num_ranks}"
    tensor = f"cluster.tensor_parallel={num_ranks}"
    return {"FSDP2": [], "tensor": [tensor, expert], "dispatch": [expert]}


def measure(folder: Path, settings: list[str], updates: int) -> tuple[float, float, int]:
    """Return the bytes that a rank sends per update, the seconds of the fastest, and its tokens."""
    batch = random_batch(1, groups=8, samples=4, longest_prompt=32, longest=96)
    policy = sharded_policy(folder, ["training.token_budget=1024", *settings])
    policy.update(batch, 1)
    seconds: list[float] = []
    with SentBytes() as sent:
        for step in range(updates):
            began = time.perf_counter()
            policy.update(batch, step + 2)
            seconds.append(time.perf_counter() - began)
    num_tokens = int(batch.prompt.lengths.sum() + batch.response.lengths.sum())
    return sent.total / updates, min(seconds), num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--updates", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = save_family(
            Path(root) / "model",
            "qwen3_moe",
            hidden_size=args.width,
            moe_intermediate_size=args.width,
            num_experts=args.experts,
            num_experts_per_tok=args.choices,
            num_key_value_heads=4,
        )
        print("| ranks | experts | bytes per rank and update | per token | fastest update, s |")
        print("|---" * 5 + "|")
        for num_ranks in args.ranks:
            for name, settings in modes(num_ranks).items():
                results = run_on_ranks(num_ranks, measure, folder, settings, args.updates)
                num_bytes = mean(result[0] for result in results)
                seconds = mean(result[1] for result in results)
                per_token = num_bytes * num_ranks / results[0][2]
                print(f"| {num_ranks} | {name} | {num_bytes:,.0f}", end=" ")
                print(f"| {per_token:,.0f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
