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
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import is_measured, write_row

HERE = Path(__file__).resolve().parent
MODULES = ("pathlib", "compare_common", "compare_rollouts", "compare_training", "compare_updates")


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
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    parser.add_argument("--limit-s", type=float, default=600.0, dest="limit_s", help="per call")
    options = parser.parse_args()
    peers = [peer for peer in options.peers if is_installed(peer)]
    missing = set(options.peers) - set(peers)
    if missing:
        print(f"not installed, left out: {', '.join(sorted(missing))}")
    results: dict[str, dict[str, dict]] = {}
    for call in plan_calls(options, peers):
        if is_measured(options.out, call, "compare"):
            continue
        for figures in run_call(call, options):
            print(" ".join(f"{name}={format_value(v)}" for name, v in figures.items()), flush=True)
            results.setdefault(str(figures.get("work")), {})[figures["name"]] = figures
    print_ratios(results)


def is_installed(peer: str) -> bool:
    module = "transformers" if peer == "hf" else peer
    return importlib.util.find_spec(module) is not None


def plan_calls(options: argparse.Namespace, peers: list[str]) -> list[str]:
    """Return the calls of functions of MODULES, one per process."""
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


def run_call(call: str, options: argparse.Namespace) -> list[dict]:
    """Return the figures that one call reported from its own process, and write them to --out."""
    imports = "; ".join(f"from {module} import *" for module in MODULES)
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); {imports}; {call}"
    command = [sys.executable, "-c", program]
    failure = ""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=options.limit_s)
        output = process.stdout
        if process.returncode:
            failure = process.stderr.strip()[-400:]
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        failure = f"no end within {options.limit_s:.0f} s"
    if failure:
        print(f"{call} failed: {failure}", flush=True)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    for figures in results if options.out else []:
        system = figures["name"]
        rest = {key: value for key, value in figures.items() if key != "name"}
        write_row(options.out, f"135M {figures.get('work')}", system, **rest)
    if options.out:
        write_row(options.out, call, "compare", **({"failed": failure} if failure else {}))
    return results


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
