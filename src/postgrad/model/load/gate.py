"""The numeric gate: which of our forward passes give the numbers of the stock model.

When a model is loaded, a few short rows go through the stock transformers forward pass, one row at
a time. Each of our passes computes the log-probs of the same tokens. The fastest kind that agrees
within rounding is used. A model with no kind left is refused with one line. The verdict is cached
by architecture, device, type and version.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import Damaged, Unsupported, first_line
from postgrad.files import atomic_write_text
from postgrad.model.device import describe_device
from postgrad.model.load.context import context_length
from postgrad.model.passes import attention
from postgrad.model.passes.head import model_outputs
from postgrad.model.passes.layout import make_micro_batches_of_kind
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.support import (
    PASS_KINDS,
    PassKind,
    Support,
    eval_mode,
    packing_problem,
    set_attention,
    set_support,
    transform_of,
    vision_of,
)
from postgrad.model.quantized import quantized_modules
from postgrad.model.views import pass_states
from postgrad.types import Batch, Trajectory

# Differences in nats that always count as rounding, by compute type: largest and mean.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# The larger the logits, the larger the effect of rounding: two attention kernels of transformers
# differ by 0.09 nats on average on unlikely tokens of SmolLM2-135M in bfloat16, 0.27 at most. So it
# is measured on the model itself, and a pass of ours may differ by this many times as much.
ROUNDING_MARGIN = 3.0
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")  # names of a window's tokens
LONGEST_WINDOW = 1024  # a row beyond a longer sliding window would take too long here
# Layer types that see other tokens through the attention mask only, or not at all.
MASKED_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe", "dense", "sparse"}
# The kind of pass, why no faster one, and Support.rounding.
Verdict = tuple[PassKind | None, list[str], tuple[float, float]]
PROMPTS = (5, 11)  # tokens per prompt
RESPONSES = ((4, 7, 1), (9, 2))  # tokens per response, by prompt


def short_rows(model: Any) -> Batch:
    """Return the rows of probe_rows that are within the sliding window."""
    return probe_rows(model, beyond_window=False)


def probe_rows(model: Any, beyond_window: bool = True) -> Batch:
    """Return rows that share prompts, of several lengths, some beyond the sliding window."""
    config = model.config.get_text_config()
    vocabulary = int(config.vocab_size)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    rows: list[Trajectory] = []
    for group, (length, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        prompt = tokens(length)
        for index, response in enumerate(responses):
            rows.append(Trajectory(f"p{group}", prompt, tokens(response), group, index))
    windows = [getattr(config, name, None) for name in WINDOWS]
    window = next((size for size in windows if isinstance(size, int) and size > 0), 0)
    context = context_length(config)
    is_exceeded = 0 < window < min(context, LONGEST_WINDOW + 1)
    if is_exceeded and beyond_window:
        prompt = tokens(min(window, context - 7))
        for index in range(2):
            rows.append(Trajectory("window", prompt, tokens(6 + index), len(PROMPTS), index))
    return Batch.of(rows)


@torch.no_grad()
def stock_logprobs(model: Any, batch: Batch) -> Tensor:
    """Return (tokens,) log-probs of the stock forward pass, one row at a time, unpadded.

    The pass reads the pixels of pictures itself.
    """
    device = next(model.parameters()).device
    columns: list[Tensor] = []
    images = batch.rows.get("images", [()] * len(batch))
    rows = zip(batch.prompt.split(), batch.response.split(), images, strict=True)
    for prompt, response, pictures in rows:
        inputs = {"input_ids": torch.cat([prompt, response]).to(device)[None]}
        if pictures:
            inputs |= vision_of(model).stock_inputs(model, inputs["input_ids"], pictures)
        logits = model(**inputs, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1)
        columns.append(logprobs.gather(1, response.to(device)[:, None])[:, 0].cpu())
    return torch.cat(columns)


def measure_rounding(model: Any, batch: Batch, stock: Tensor) -> tuple[float, float]:
    """Return the mean and largest change of log-probs when the embeddings are rounded differently.

    Each entry of the embeddings changes by at most the spacing of the compute type at its size. On
    SmolLM2-135M in bfloat16 this changes log-probs as much as another attention kernel does.
    Zeros in float32, where TOLERANCE is far above rounding.
    """
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return (0.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    spacing = torch.finfo(dtype).eps / 2

    def round_differently(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        noise = torch.empty(output.shape).uniform_(-spacing, spacing, generator=generator)
        return (output.float() * (1.0 + noise.to(output.device))).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(round_differently)
    try:
        gap = (stock_logprobs(model, batch) - stock).abs()
    finally:
        hook.remove()
    return (gap.mean().item(), gap.max().item())


@torch.no_grad()
def our_logprobs(model: Any, batch: Batch, kind: PassKind) -> Tensor:
    """(tokens,) log-probs by our passes of one kind."""
    out = torch.zeros(batch.num_tokens)
    for where, logprobs in _our_passes(model, batch, kind):
        out[where] = logprobs.float().cpu()
    return out


def _our_passes(model: Any, batch: Batch, kind: PassKind) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens of the batch, their log-probs) of each of our passes of one kind."""
    device = next(model.parameters()).device
    for micro in make_micro_batches_of_kind(kind, batch, 4096, model):
        micro = micro.to(device)
        where = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
        states = pass_states(model, micro)
        targets = batch.response.values[where].to(device)
        picked = states.flatten(0, 1)[micro.gather]
        yield where, model_outputs(model, picked, targets).logprobs


@torch.enable_grad()
def stock_parameters(model: Any) -> set[str]:
    """Return the names of the parameters that the stock forward pass of short rows depends on."""
    names: set[str] = set()
    device = next(model.parameters()).device
    batch = short_rows(model)
    for prompt, response in zip(batch.prompt.split(), batch.response.split(), strict=True):
        ids = torch.cat([prompt, response]).to(device)[None]
        names |= parameters_of(model, model(input_ids=ids, use_cache=False).logits)
    return names


@torch.enable_grad()
def our_parameters(model: Any, kind: PassKind) -> set[str]:
    """Return the names of the parameters that our passes over the same rows depend on."""
    names: set[str] = set()
    for _, logprobs in _our_passes(model, short_rows(model), kind):
        names |= parameters_of(model, logprobs)
    return names


def parameters_of(model: Any, output: Tensor) -> set[str]:
    """Return the names of the parameters in the autograd graph of an output."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if id(variable) in names:
            found.add(names[id(variable)])
        waiting += [next_node for next_node, _ in node.next_functions]
    return found


def try_backward(model: Any, batch: Batch, kind: PassKind) -> None:
    """Run the backward pass of our kernels once; it fails where the device lacks resources."""
    device = next(model.parameters()).device
    for micro in make_micro_batches_of_kind(kind, batch, 4096, model):
        if not isinstance(micro.packing, Packing):
            continue
        micro = micro.to(device)
        with torch.enable_grad():
            states = pass_states(model, micro)
            # The gradient of one weight: the others' need not fit into memory here.
            torch.autograd.grad(states.float().sum(), model.get_input_embeddings().weight)


def disagreement(
    ours: Tensor, stock: Tensor, dtype: torch.dtype, rounding: tuple[float, float] = (0.0, 0.0)
) -> str:
    """Return how far two columns are apart when it is more than rounding; empty when it is not.

    `rounding` is the mean and the largest effect of rounding on the stock model.
    """
    gap = (ours - stock).abs()
    largest = gap.max().item()
    mean = gap.mean().item()
    mean_rounding, largest_rounding = rounding
    bound = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    mean_bound = MEAN_TOLERANCE.get(dtype, MEAN_TOLERANCE[torch.bfloat16])
    bound = max(bound, ROUNDING_MARGIN * largest_rounding)
    mean_bound = max(mean_bound, ROUNDING_MARGIN * mean_rounding)
    if largest <= bound and mean <= mean_bound:
        return ""
    return (
        f"log-probs differ from the stock model's by up to {largest:.2g} nats ({mean:.2g} on "
        f"average); its own rounding explains {bound:.2g} ({mean_bound:.2g})"
    )


class Gate:
    """Decides how the passes of one model are run.

    `measure` is called on the stock model, before its attention and kernels are replaced, `decide`
    after.
    """

    def __init__(self, model: Any, cache: Path) -> None:
        self.model = model
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # the fused kernels leave the cap out
        self.stock_attention = model.config._attn_implementation
        self.dtype = next(model.parameters()).dtype
        self.file = cache / "gate" / f"{fingerprint(model)}.json"
        self.verdict = read_verdict(self.file)
        self.kinds: Sequence[PassKind] = PASS_KINDS
        self.batch: Batch | None = None
        self.stock = torch.empty(0)
        self.rounding = (0.0, 0.0)
        self.parameters: set[str] = set()

    def measure(self) -> None:
        """Run the stock forward pass on the probe rows, unless the verdict is cached."""
        if self.verdict is None:
            self.batch = self.probe_rows()
            with eval_mode(self.model):
                self.stock = self._stock_logprobs(self.batch)
                if self.stock.isnan().any():  # no verdict about the architecture, so none is kept
                    raise Damaged(
                        "the model's log-probs are not numbers (NaN): its weights are damaged; "
                        "start from other weights or an earlier checkpoint",
                        at="model.path",
                    )
                self.rounding = measure_rounding(self.model, self.batch, self.stock)
                self.parameters = stock_parameters(self.model)

    def probe_rows(self) -> Batch:
        """Return the rows on which passes are compared."""
        return probe_rows(self.model)

    def _stock_logprobs(self, batch: Batch) -> Tensor:
        try:
            return stock_logprobs(self.model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # code of other people fails in many ways
            raise Unsupported(
                f"{type(self.model).__name__} is not supported: its own forward pass of a text "
                f"fails ({type(error).__name__}: {first_line(error)}); correct its config.json, or "
                "train a model of another family",
                at="model.path",
            ) from error

    def decide(self) -> Support:
        """Choose the kind of pass, leave the model with the attention it needs, and note it.

        Raises ConfigError when no kind gives the stock model's numbers.
        """
        passes, reasons, rounding = self.find_verdict()
        if passes is None:
            raise Unsupported(
                f"{type(self.model).__name__} is not supported: {'; '.join(reasons)}; "
                "train a model of another family",
                at="model.path",
            )
        kind: PassKind = passes
        set_attention(self.model, self._attention(kind))
        support = Support(kind, transform_of(self.model), tuple(reasons), rounding)
        set_support(self.model, support)
        return support

    def _attention(self, kind: PassKind) -> str:
        return self.stock_attention if kind == "rows" else attention.NAME

    def find_verdict(self) -> Verdict:
        """Return the cached verdict, or compare and cache it."""
        if self.verdict is None:
            self.verdict = self._compare()
            with suppress(OSError):  # without a cache the next load measures again
                self.file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_text(self.file, json.dumps(self.verdict))
        return self.verdict

    def _compare(self) -> Verdict:
        assert self.batch is not None
        reasons: list[str] = []
        for kind in self.kinds:
            reason = self._reason_against(kind, self.batch)
            if not reason:
                return kind, reasons, self.rounding
            reasons.append(f"{kind}: {reason}")
        return None, reasons, self.rounding

    def _reason_against(self, kind: PassKind, batch: Batch) -> str:
        """Return why passes of this kind cannot be used; empty when they can."""
        if kind == "packed" and (problem := packing_problem(self.model)):
            return problem
        if kind == "shared" and (layers := unusual_layers(self.model)):
            return f"a mask cannot express {layers}"
        set_attention(self.model, self._attention(kind))
        try:
            with eval_mode(self.model):
                ours = our_logprobs(self.model, batch, kind)
                try_backward(self.model, batch, kind)
                # A parameter that is zero, such as a new bias, does not show in the numbers.
                left_out = sorted(self.parameters - our_parameters(self.model, kind))
        except torch.OutOfMemoryError:
            raise  # says nothing about the model, so it must not become a cached verdict
        except Exception as error:
            return first_line(error)
        if left_out:
            return f"these passes leave out the parameter {left_out[0]}"
        if reason := disagreement(ours, self.stock, self.dtype, self.rounding):
            return reason
        routers = [m for m in self.model.modules() if hasattr(m, "router_jitter_noise")]
        if routers or (self.model.training and self._differs_in_training(kind, batch)):
            return "it computes other log-probs in training mode, such as by random routing"
        return ""

    def _differs_in_training(self, kind: PassKind, batch: Batch) -> bool:
        ours = our_logprobs(self.model, batch, kind)
        return bool(disagreement(ours, self.stock, self.dtype, self.rounding))


def unusual_layers(model: Any) -> str:
    """Name what makes some layer depend on more than a mask and a sliding window."""
    config = model.config.get_text_config()
    for name in ("attention_chunk_size", "index_topk"):
        if getattr(config, name, None):
            return name
    kinds = set(getattr(config, "layer_types", None) or ())
    return ", ".join(sorted(kinds - MASKED_LAYERS))


def fingerprint(model: Any, more_sources: Sequence[Path] = ()) -> str:
    """Hash of what a verdict depends on: configuration, type, device, versions and our sources."""
    import transformers

    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    parameter = next(model.parameters())
    sources = [
        *sorted(Path(attention.__file__).parent.rglob("*.py")),
        Path(__file__),
        *more_sources,
    ]
    parts: Sequence[str] = (
        type(model).__name__,
        json.dumps(config, sort_keys=True, default=str),
        str(parameter.dtype),
        "4bit" if quantized_modules(model) else "",
        describe_device(parameter.device),
        torch.__version__,
        transformers.__version__,
        *(hashlib.sha256(file.read_bytes()).hexdigest() for file in sources),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def read_verdict(file: Path) -> Verdict | None:
    """Return the cached verdict; None where there is none that can be read."""
    try:
        passes, reasons, (mean, largest) = json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        return None
    if passes is not None and passes not in PASS_KINDS:
        return None
    return passes, reasons, (mean, largest)
