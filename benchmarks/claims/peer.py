"""What the scripts of other trainers share: their options and metrics.jsonl."""

import argparse
import json
import time
from pathlib import Path


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    for name in ("model", "train", "test", "folder"):
        parser.add_argument(f"--{name}", required=True)
    numbers = ("steps", "problems", "samples", "tokens", "prompt-tokens", "seed")
    for name in (*numbers, "validate-every", "test-problems"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--token-budget", type=int, required=True, help="of responses in a pass")
    parser.add_argument("--cache-gib", type=float, required=True, help="vLLM's KV cache")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--no-correction", action="store_true", help="of vLLM's log-probs")
    marks = "validate before these seconds, and not every few steps"
    parser.add_argument("--marks", type=float, nargs="+", default=[], help=marks)
    parser.add_argument("--smoke", action="store_true", help="small sizes on a CPU")
    options = parser.parse_args()
    if options.smoke:
        options.problems, options.samples, options.tokens = 4, 4, 24
    return options


class Metrics:
    """RUN/metrics.jsonl, flushed after every line."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "metrics.jsonl").open("w")

    def write(self, step: int, **values: float) -> None:
        line = {"step": step, "time": time.time(), **values}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
