"""Megatron Core's model against Postgrad's packed pass: log-probs, gradients, time and memory.

    python benchmarks/gpu/megatron_pass.py --folder /dev/shm/shapes
    python benchmarks/gpu/megatron_pass.py --cases tiny --device cpu

Both compute the loss sum(weight * logprob) over the same rows of random tokens, and both add their
gradients to float32 copies by Postgrad's optimizer class. `tiny` and `gradients` compare with
transformers in float32, on a tiny model and on the 0.6B shape. `0.6b` and `1.7b` time one step of
forward and backward over 16 rows of 1,024 tokens in bfloat16, in passes of 8,192 tokens. `ragged`
has rows of 64 to 1,024 tokens; Megatron's are padded, because its packed rows need Transformer
Engine. One JSON line per measurement. Each case runs in a child process with a time limit.
"""

import argparse
import gc
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CASES = ("tiny", "gradients", "0.6b", "1.7b", "ragged")
VARIANTS = (("sdpa", False), ("sdpa", True), ("local", False))  # attention, fusions
PASS_ROWS = 8
MAX_ROW = 1024
SECONDS_PER_CASE = 120


def make_rows(lengths: Sequence[int], folder: Path) -> Any:
    """Return a batch of random rows, the longest first, with a random loss weight per token.

    The first token of a row is its prompt. The weights are divided by the number of tokens. No
    token is padding: transformers gives the embedding of padding no gradient, and Megatron does.
    """
    import torch

    from postgrad.types import Batch, Trajectory

    config = json.loads((folder / "config.json").read_text())
    known = [i for i in range(config["vocab_size"]) if i != config["pad_token_id"]]
    rng = random.Random(0)
    rows: list[Trajectory] = []
    for i, length in enumerate(sorted(lengths, reverse=True)):
        ids = rng.choices(known, k=length)
        rows.append(Trajectory(f"row{i}", ids[:1], ids[1:], group=i))
    batch = Batch.of(rows)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    batch.tokens["weight"] = weights / batch.num_tokens
    return batch


class WeightedLogprobs:
    """An objective whose loss is the sum of weight * logprob over the response tokens."""

    def view(self, step: int) -> Any:
        from postgrad.model.views import FULL

        return FULL

    def prepare(self, batch: Any) -> Any:
        return batch

    def loss(self, batch: Any, current: Any, metrics: Any) -> Any:
        return (batch.tokens["weight"] * current.logprobs).sum()

    def row_groups(self, batch: Any) -> None:
        return None

    def target_ids(self, batch: Any) -> Any:
        return batch.response.values

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        return {}


class PostgradPass:
    """Forward and backward passes of Postgrad's policy."""

    def __init__(self, folder: Path, dtype: str, device: Any) -> None:
        from postgrad.config.compose import compose
        from postgrad.methods import find_method
        from postgrad.model.load import load
        from postgrad.model.policy import LocalPolicy

        overrides = [
            f"model.path={folder}",
            f"model.dtype={dtype}",
            f"model.device={device.type}",
            "data.train=arithmetic:1",
            f"training.token_budget={PASS_ROWS * MAX_ROW}",
        ]
        config = compose("grpo", overrides, lambda name: find_method(name).Settings)
        config.rollout.temperature = 1.0
        self.policy = LocalPolicy(config, load(config.model, device), WeightedLogprobs())

    def logprobs(self, batch: Any) -> Any:
        """Return the (tokens,) log-probs of the response tokens, on the CPU."""
        return self.policy.logprobs(batch)["logprobs"]

    def step(self, batch: Any) -> float:
        """Replace the gradients by those of the batch; return the loss."""
        from postgrad.model.metrics import MetricAccumulator
        from postgrad.model.views import FULL

        metrics = MetricAccumulator()
        self.policy.optimizer.adam.zero_grad(set_to_none=True)
        self.policy.accumulate(batch, FULL, metrics)
        return metrics.result()["loss"]

    def gradients(self) -> dict[str, Any]:
        """Return the gradients by Megatron's names."""
        from megatron_model import to_megatron

        masters = self.policy.optimizer.masters
        return to_megatron({name: m.grad for name, m in masters.items()}, self.policy.model.config)


class PaddedPass:
    """Forward and backward passes over padded rows, by Megatron's model or transformers'."""

    def __init__(self, model: Any, token_logprobs: Callable[..., Any], config: Any) -> None:
        from postgrad.config.schema import OptimizerConfig
        from postgrad.model.optimizer import Optimizer

        self.model = model
        self.token_logprobs = token_logprobs
        self.config = config  # of transformers; None: the names are Megatron's
        self.device = next(model.parameters()).device
        self.optimizer = Optimizer(model, OptimizerConfig())

    def passes(self, batch: Any) -> Any:
        """Yield padded ids (rows, length) and, for the tokens after the first, where they are."""
        import torch

        rows = [
            torch.cat(row) for row in zip(batch.prompt.split(), batch.response.split(), strict=True)
        ]
        for first in range(0, len(rows), PASS_ROWS):
            some = rows[first : first + PASS_ROWS]
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            lengths = torch.tensor([len(row) for row in some])
            is_target = torch.arange(1, ids.shape[1]) < lengths[:, None]
            yield ids.to(self.device), is_target.to(self.device)

    def logprobs(self, batch: Any) -> Any:
        """Return the (tokens,) log-probs of the response tokens, on the CPU."""
        import torch

        with torch.no_grad():
            parts = [
                self.token_logprobs(self.model, ids)[is_target]
                for ids, is_target in self.passes(batch)
            ]
        return torch.cat(parts).cpu()

    def step(self, batch: Any) -> float:
        """Replace the gradients by those of the batch; return the loss."""
        self.optimizer.adam.zero_grad(set_to_none=True)
        weights = batch.tokens["weight"].to(self.device)
        total = 0.0
        first = 0
        for ids, is_target in self.passes(batch):
            logprobs = self.token_logprobs(self.model, ids)[is_target]
            loss = (weights[first : first + len(logprobs)] * logprobs).sum()
            loss.backward()
            first += len(logprobs)
            total = total + loss.detach()
        return float(total)

    def gradients(self) -> dict[str, Any]:
        """Return the gradients by Megatron's names."""
        from megatron_model import to_megatron

        gradients = {name: m.grad for name, m in self.optimizer.masters.items()}
        return gradients if self.config is None else to_megatron(gradients, self.config)


def stock_logprobs(model: Any, ids: Any) -> Any:
    """Return the (rows, length - 1) log-probs of ids[:, 1:] from the full logits."""
    logits = model(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def megatron_logprobs(model: Any, ids: Any) -> Any:
    """Return the same log-probs from Megatron's own cross entropy."""
    import torch
    from megatron_model import causal_mask

    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)  # the last one of a row is not read
    losses = model(ids, positions, causal_mask(ids.shape[1], ids.device), labels=labels)
    return -losses[:, :-1]


def load_stock(folder: Path, dtype: str, device: Any) -> Any:
    """Return the transformers model of the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)


def make_pass(kind: Sequence[Any], folder: Path, dtype: str, device: Any) -> Any:
    """Return the passes of `postgrad`, `transformers` or `megatron`, attention, fusions."""
    from megatron_model import make_megatron

    if kind[0] == "postgrad":
        return PostgradPass(folder, dtype, device)
    stock = load_stock(folder, dtype, device)
    if kind[0] == "transformers":
        return PaddedPass(stock, stock_logprobs, stock.config)
    return PaddedPass(make_megatron(stock, *kind[1:]), megatron_logprobs, None)


def compare(folder: Path, lengths: Sequence[int], device: Any, dtypes: Sequence[str]) -> bool:
    """Compare log-probs and gradients with transformers in float32; return whether all ran.

    `logprob_error` is the largest difference in nats. `gradient_error` is the norm of the
    difference divided by the gradient's norm, of the tensor where it is largest.
    """
    reference = make_pass(["transformers"], folder, "float32", device)
    batch = make_rows(lengths, folder)
    expected = reference.logprobs(batch)
    loss = reference.step(batch)
    gradients = {name: g.clone() for name, g in reference.gradients().items()}
    tied = reference.config.tie_word_embeddings
    print_line(compared_with="transformers float32", tied=tied, rows=len(batch), loss=loss)
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
            "tied": tied,
            "dtype": dtype,
            "loss": loss,
            "logprob_error": float((logprobs - expected).abs().max()),
            "gradient_error": errors[worst],
            "worst": worst,
        }

    kinds = [("megatron", attention, False) for attention in ("local", "sdpa")]
    kinds += [("postgrad",), ("transformers",)]
    results: list[bool] = []
    for dtype in dtypes:
        for kind in kinds:
            if (kind, dtype) != (("transformers",), "float32"):
                results.append(attempt(measure, kind, dtype))
    return all(results)


def time_steps(folder: Path, lengths: Sequence[int], device: Any, variants: Any) -> bool:
    """Time forward and backward in bfloat16; return whether all ran.

    Postgrad comes last, because the memory of its captured graphs is counted until the end.
    `start_gib` has the weights and their float32 copies.
    """
    import torch

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
    from sizes import make_model

    from postgrad.model.tiny import make_tiny

    warnings.filterwarnings("ignore")  # Megatron warns of each package that it does not find
    logging.disable(logging.WARNING)
    device = torch.device(args.device)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    start_megatron(device)
    dtypes = ("float32", "bfloat16") if device.type == "cuda" else ("float32",)
    equal = [MAX_ROW] * 2 * PASS_ROWS
    ragged = [64 * (i + 1) for i in range(2 * PASS_ROWS)]
    with without_cuda(device):
        if args.case == "tiny":
            ran: list[bool] = []
            for tied in (True, False):
                tiny = make_tiny(folder / f"tiny-{tied}", 0, tied=tied)
                ran.append(compare(tiny, [5, 16, 31, 64], device, dtypes))
            return all(ran)
        if args.case == "gradients":
            model = make_model(folder, "0.6b")
            return compare(model, [64, 128, 256, 256], device, dtypes)
        if args.case == "ragged":
            return time_steps(make_model(folder, "0.6b"), ragged, device, VARIANTS[:1])
        return time_steps(make_model(folder, args.case), equal, device, VARIANTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas between them")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the case tiny")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--case", choices=CASES, help="run this one in this process")
    args = parser.parse_args()
    if args.case:
        return 0 if run_case(args) else 1
    failed = False
    for case in args.cases.split(","):
        start = time.monotonic()
        command = [sys.executable, __file__, "--case", case]
        command += ["--device", args.device, "--folder", args.folder]
        try:
            code: Any = subprocess.run(command, timeout=SECONDS_PER_CASE).returncode
        except subprocess.TimeoutExpired:
            code = "time limit"
        print_line(case=case, exit_code=code, seconds=round(time.monotonic() - start, 1))
        failed = failed or code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
