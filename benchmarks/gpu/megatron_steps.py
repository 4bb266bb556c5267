"""Steps of forward and backward over the same rows: Postgrad's, Megatron's and transformers'.

Each class has `logprobs(batch)`, `step(batch)` and `gradients()`, so megatron_compare.py measures
them alike. Postgrad's optimizer class accumulates the gradients of all in float32.
"""

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron_model import causal_mask, make_megatron, to_megatron
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from postgrad.config.compose import compose
from postgrad.config.schema import OptimizerConfig
from postgrad.methods import find_method
from postgrad.model.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.optimizer import Optimizer
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import LocalPolicy
from postgrad.model.views import FULL, View
from postgrad.types import Batch, Trajectory

PASS_ROWS = 8  # rows per pass of padded rows
MAX_ROW = 1024  # tokens; Postgrad's passes have PASS_ROWS * MAX_ROW tokens


def make_rows(lengths: Sequence[int], folder: Path) -> Batch:
    """Return a batch of random rows, the longest first, with a random loss weight per token.

    The first token of a row is its prompt. The weights are divided by the number of tokens. No
    token is padding: transformers gives the embedding of padding no gradient, and Megatron does.
    """
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

    def view(self, step: int) -> View:
        return FULL

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        return (batch.tokens["weight"] * current.logprobs).sum()

    def row_groups(self, batch: Batch) -> None:
        return None

    def target_ids(self, batch: Batch) -> Tensor:
        return batch.response.values

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        return {}


class PostgradPass:
    """Forward and backward passes of Postgrad's policy."""

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        overrides = [
            f"model.path={folder}",
            f"model.dtype={dtype}",
            f"model.device={device.type}",
            "data.train=arithmetic:1",
            "rollout.temperature=1.0",
            f"training.token_budget={PASS_ROWS * MAX_ROW}",
        ]
        config = compose("grpo", overrides, lambda name: find_method(name).Settings)
        self.policy = LocalPolicy(config, load(config.model, device), WeightedLogprobs())

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the (tokens,) log-probs of the response tokens, on the CPU."""
        return self.policy.logprobs(batch)["logprobs"]

    def step(self, batch: Batch) -> float:
        """Replace the gradients by those of the batch; return the loss."""
        metrics = MetricAccumulator()
        self.policy.optimizer.adam.zero_grad(set_to_none=True)
        self.policy.accumulate(batch, FULL, metrics)
        return metrics.result()["loss"]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by Megatron's names."""
        return to_megatron(own_gradients(self.policy.optimizer), self.policy.model.config)


class PaddedPass:
    """Forward and backward passes over padded rows, by Megatron's model or transformers'."""

    def __init__(
        self, model: nn.Module, token_logprobs: Callable[..., Tensor], config: Any
    ) -> None:
        self.model = model
        self.token_logprobs = token_logprobs
        self.config = config  # of transformers; None: the names are Megatron's
        self.device = next(model.parameters()).device
        self.optimizer = Optimizer(model, OptimizerConfig())

    def passes(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield padded ids (rows, length) and, for the tokens after the first, where they are."""
        rows = [
            torch.cat(row) for row in zip(batch.prompt.split(), batch.response.split(), strict=True)
        ]
        for first in range(0, len(rows), PASS_ROWS):
            some = rows[first : first + PASS_ROWS]
            ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
            lengths = torch.tensor([len(row) for row in some])
            is_target = torch.arange(1, ids.shape[1]) < lengths[:, None]
            yield ids.to(self.device), is_target.to(self.device)

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the (tokens,) log-probs of the response tokens, on the CPU."""
        with torch.no_grad():
            parts = [
                self.token_logprobs(self.model, ids)[is_target]
                for ids, is_target in self.passes(batch)
            ]
        return torch.cat(parts).cpu()

    def step(self, batch: Batch) -> float:
        """Replace the gradients by those of the batch; return the loss."""
        self.optimizer.adam.zero_grad(set_to_none=True)
        weights = batch.tokens["weight"].to(self.device)
        total = torch.zeros((), device=self.device)
        first = 0
        for ids, is_target in self.passes(batch):
            logprobs = self.token_logprobs(self.model, ids)[is_target]
            loss = (weights[first : first + len(logprobs)] * logprobs).sum()
            loss.backward()
            first += len(logprobs)
            total += loss.detach()
        return float(total)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by Megatron's names."""
        gradients = own_gradients(self.optimizer)
        return gradients if self.config is None else to_megatron(gradients, self.config)


def own_gradients(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the accumulated gradients by parameter name."""
    gradients: dict[str, Tensor] = {}
    for name, master in optimizer.masters.items():
        assert master.grad is not None
        gradients[name] = master.grad
    return gradients


def stock_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return the (rows, length - 1) log-probs of ids[:, 1:] from the full logits."""
    logits = model(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def megatron_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return the same log-probs from Megatron's own cross entropy."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)  # the last one of a row is not read
    losses = model(ids, positions, causal_mask(ids.shape[1], ids.device), labels=labels)
    return -losses[:, :-1]


@functools.cache
def load_stock(folder: Path, dtype: str) -> Any:
    """Return the transformers model of the folder, in host memory."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def make_pass(
    kind: Sequence[Any], folder: Path, dtype: str, device: torch.device
) -> PostgradPass | PaddedPass:
    """Return the passes of `postgrad`, `transformers` or `megatron`, attention, fusions."""
    if kind[0] == "postgrad":
        return PostgradPass(folder, dtype, device)
    stock = load_stock(folder, dtype)
    if kind[0] == "transformers":
        return PaddedPass(copy.deepcopy(stock).to(device), stock_logprobs, stock.config)
    return PaddedPass(make_megatron(stock, device, *kind[1:]), megatron_logprobs, None)
