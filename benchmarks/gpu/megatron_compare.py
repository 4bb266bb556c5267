"""Megatron Core's model against Postgrad's packed pass: log-probs, gradients, time and memory.

    python benchmarks/gpu/megatron_compare.py --folder /dev/shm/shapes
    python benchmarks/gpu/megatron_compare.py --cases compare --device cpu

It needs `pip install megatron-core` and random weights only (sizes.py). Both compute the loss
sum(weight * logprob) over the same rows of random tokens, and Postgrad's optimizer class
accumulates their gradients in float32. `compare` compares log-probs and gradients with
transformers in float32: a tiny model with tied and untied head and, on a GPU, the 0.6B shape and
bfloat16. `0.6b` and `1.7b` time forward and backward over 16 rows of 1,024 tokens in bfloat16, in
passes of 8,192 tokens. `ragged` has rows of 64 to 1,024 tokens of the 0.6B shape; Megatron's are
padded, because its packed rows need Transformer Engine. One JSON line per measurement. Each case
runs in a child process; cases beyond the time limit are left out.
"""

import argparse
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CASES = ("compare", "0.6b", "1.7b", "ragged")
VARIANTS = (("sdpa", False), ("local", False), ("sdpa", True))  # attention, fusions


def compare(folder: Path, lengths: Sequence[int], device: Any, variants: Any) -> bool:
    """Compare log-probs and gradients with transformers in float32; return whether all ran.

    `logprob_error` is the largest difference in nats. `gradient_error` is the norm of the
    difference divided by the gradient's norm, of the tensor where it is largest. A GPU computes in
    bfloat16, too.
    """
    from megatron_steps import make_pass, make_rows

    reference = make_pass(["transformers"], folder, "float32", device)
    batch = make_rows(lengths, folder)
    expected = reference.logprobs(batch)
    loss = reference.step(batch)
    gradients = {name: g.clone() for name, g in reference.gradients().items()}
    print_line(compared_with="transformers float32", weights=folder.name, loss=loss)
    del reference

    def measure(kind: Sequence[Any], dtype: str) -> dict[str, Any]:
        model = make_pass(kind, folder, dtype, device)
        logprobs = model.logprobs(batch)
        loss = model.step(batch)
        errors: dict[str, float] = {}
        for name, gradient in model.gradients().items():
            difference = (gradient.float() - gradients[name]).norm()
            errors[name] = float(difference / gradients[name].norm())
        worst = max(errors, key=lambda name: errors[name])
        return {
            "weights": folder.name,
            "dtype": dtype,
            "loss": loss,
            "logprob_error": float((logprobs - expected).abs().max()),
            "gradient_error": errors[worst],
            "worst": worst,
        }

    kinds = [*(("megatron", *variant) for variant in variants), ("postgrad",)]
    results = [attempt(measure, kind, "float32") for kind in kinds]
    if device.type == "cuda":
        kinds.append(("transformers",))
        results += [attempt(measure, kind, "bfloat16") for kind in kinds]
    return all(results)


def time_steps(folder: Path, lengths: Sequence[int], device: Any, variants: Any) -> bool:
    """Time forward and backward in bfloat16; return whether all ran.

    Postgrad comes last, because the memory of its captured graphs is counted until the end.
    `start_gib` has the weights and their float32 copies.
    """
    import torch
    from megatron_steps import make_pass, make_rows

    from postgrad.model.device import memory_held, peak_memory_bytes, synchronize

    batch = make_rows(lengths, folder)

    def measure(kind: Sequence[Any], steps: int) -> dict[str, Any]:
        model = make_pass(kind, folder, "bfloat16", device)
        collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start_bytes = memory_held(device)
        seconds: list[float] = []
        loss = 0.0
        for _ in range(1 + steps):
            synchronize(device)
            start = time.perf_counter()
            loss = model.step(batch)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        norms = torch.stack([g.float().norm() for g in model.gradients().values()])
        return {
            "weights": folder.name,
            "tokens": sum(lengths),
            "step_s": round(min(seconds[1:]), 4),
            "tokens_per_second": round(sum(lengths) / min(seconds[1:])),
            "first_s": round(seconds[0], 2),
            "start_gib": round(start_bytes / 2**30, 2),
            "memory_gib": round(peak_memory_bytes(device) / 2**30, 2),
            "loss": loss,
            "gradient_norm": float(norms.norm()),
        }

    kinds = [("megatron", *variant) for variant in variants]
    results = [attempt(measure, kind, 3) for kind in [*kinds, ("postgrad",)]]
    return all(results)


def attempt(measure: Callable[..., dict[str, Any]], kind: Sequence[Any], *args: Any) -> bool:
    """Print the result of one measurement, or why it failed; return whether it ran."""
    line: dict[str, Any] = {"model": kind[0]}
    if len(kind) > 1:
        line |= {"attention": kind[1], "fusions": kind[2]}
    try:
        line |= measure(kind, *args)
    except Exception as error:  # the other measurements go on
        line["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    collect()
    print_line(**line)
    return "failed" not in line


def print_line(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def collect() -> None:
    """Free the memory of models that are no longer used."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_case(args: argparse.Namespace) -> bool:
    """Run the measurements of one case in this process; return whether all ran."""
    import torch
    from megatron_model import start_megatron, without_cuda
    from megatron_steps import MAX_ROW, PASS_ROWS
    from sizes import make_model
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore")  # Megatron warns of each package that it does not find
    logging.disable(logging.WARNING)
    device = torch.device(args.device)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    start_megatron(device, args.collectives if device.type == "cuda" else "gloo")
    equal = [MAX_ROW] * 2 * PASS_ROWS
    ragged = [64 * (i + 1) for i in range(2 * PASS_ROWS)]
    with without_cuda(device):
        if args.case == "compare":
            return compare_all(folder, device)
        if args.case == "ragged":
            return time_steps(make_model(folder, "0.6b"), ragged, device, VARIANTS[:1])
        variants = VARIANTS if args.case == "0.6b" else VARIANTS[:2]
        return time_steps(make_model(folder, args.case), equal, device, variants)


def compare_all(folder: Path, device: Any) -> bool:
    """Compare with transformers: tiny models, and the 0.6B shape on a GPU."""
    from sizes import make_model

    from postgrad.model.tiny import make_tiny

    lengths = [5, 16, 31, 64]
    tied = make_tiny(folder / "tiny-tied", 0)
    untied = make_tiny(folder / "tiny-untied", 0, tied=False)
    ran = [compare(tied, lengths, device, VARIANTS)]
    ran.append(compare(untied, lengths, device, VARIANTS[:2]))
    if device.type == "cuda":
        lengths = [64, 128, 256, 256]
        ran.append(compare(make_model(folder, "0.6b"), lengths, device, VARIANTS[:2]))
    return all(ran)


def run_cases(args: argparse.Namespace) -> int:
    """Run each case in a child process; return the exit code: 0 if every measurement ran."""
    deadline = time.monotonic() + args.limit_s
    failed = False
    for case in args.cases.split(","):
        start = time.monotonic()
        command = [sys.executable, __file__, "--case", case, "--device", args.device]
        command += ["--folder", args.folder, "--collectives", args.collectives]
        try:
            code: Any = subprocess.run(command, timeout=max(0.1, deadline - start)).returncode
        except subprocess.TimeoutExpired:
            code = "time limit"
        print_line(case=case, exit_code=code, seconds=round(time.monotonic() - start, 1))
        failed = failed or code != 0
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas between them")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the case compare")
    parser.add_argument("--collectives", default="nccl", help="nccl or gloo, on a GPU")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--limit-s", type=float, default=120.0, dest="limit_s")
    parser.add_argument("--case", choices=CASES, help="run this one in this process")
    args = parser.parse_args()
    if args.case:
        return 0 if run_case(args) else 1
    return run_cases(args)


if __name__ == "__main__":
    sys.exit(main())
