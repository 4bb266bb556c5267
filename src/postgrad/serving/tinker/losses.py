"""Tinker's losses: sums over the tokens of all data, without any average.

| name | per token; p are present log-probs, q the given ones, A advantages, r = exp(p - q) |
|---|---|
| cross_entropy | -weight · p |
| importance_sampling | -A r |
| ppo | -min(A r, A clip(r, low, high)) |
| cispo | -sg(clip(r, low, high)) A p |
| gspo | as ppo, with the ratio of the whole sequence (GSPO-token) |
| dro | -(A p - beta / 2 · (p - q)²) |

low and high are `clip_low_threshold` and `clip_high_threshold`. p - q is clamped to +-20.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from postgrad.algorithms import losses
from postgrad.errors import ConfigError, did_you_mean
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.views import FULL, View
from postgrad.serving.tinker.messages import Datum
from postgrad.types import Batch, Trajectory

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"

Options = dict[str, float]


@dataclass(frozen=True)
class TinkerLoss:
    """A loss by name: its function of (batch, log-probs, options), inputs and options.

    An option of None has no default.
    """

    function: Callable[[Batch, Tensor, Options], Tensor]
    inputs: tuple[str, ...]
    options: dict[str, float | None] = field(default_factory=dict)


def cross_entropy(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    return -batch.tokens["weights"] * logprobs


def importance_sampling(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    columns = batch.tokens
    return losses.ppo_clip(
        logprobs, columns["logprobs"], columns["advantages"], clip_low=None, clip_high=None
    ).values


def ppo(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    columns = batch.tokens
    low, high = 1 - options[LOW], options[HIGH] - 1
    return losses.ppo_clip(
        logprobs,
        columns["logprobs"],
        columns["advantages"],
        clip_low=low,
        clip_high=high,
        dual_clip=None,
    ).values


def cispo(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    columns = batch.tokens
    low, high = 1 - options[LOW], options[HIGH] - 1
    return losses.cispo(
        logprobs, columns["logprobs"], columns["advantages"], clip_low=low, clip_high=high
    ).values


def gspo(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    columns = batch.tokens
    return losses.gspo(
        logprobs,
        columns["logprobs"],
        columns["advantages"],
        columns["sequence_ratio_mask"] != 0,
        batch.row_index,
        len(batch),
        clip_low=1 - options[LOW],
        clip_high=options[HIGH] - 1,
    ).values


def dro(batch: Batch, logprobs: Tensor, options: Options) -> Tensor:
    distance = losses.log_ratio(logprobs, batch.tokens["logprobs"])
    penalty = 0.5 * options["beta"] * distance**2
    return -(batch.tokens["advantages"] * logprobs - penalty)


POLICY_INPUTS = ("logprobs", "advantages")

LOSSES = {
    "cross_entropy": TinkerLoss(cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(importance_sampling, POLICY_INPUTS),
    "ppo": TinkerLoss(ppo, POLICY_INPUTS, {LOW: 0.8, HIGH: 1.2}),
    "cispo": TinkerLoss(cispo, POLICY_INPUTS, {LOW: 0.0, HIGH: 4.0}),
    "gspo": TinkerLoss(gspo, (*POLICY_INPUTS, "sequence_ratio_mask"), {LOW: None, HIGH: None}),
    "dro": TinkerLoss(dro, POLICY_INPUTS, {"beta": 0.05}),
}


class LossObjective:
    """The objective of one training pass; collects the log-probs that the pass computes."""

    def __init__(self, name: str, options: Options) -> None:
        """Raises ConfigError: there is no such loss, or it has other options."""
        if name not in LOSSES:
            raise ConfigError(f"loss_fn={name} is not a loss of this server; known: {_names()}")
        self.tinker_loss = LOSSES[name]
        known = self.tinker_loss.options
        for option, value in options.items():
            if option not in known:
                raise ConfigError(
                    f"loss_fn_config has {option}, which {name} does not take; "
                    f"{did_you_mean(option, known)}"
                )
            if not np.isfinite(value) or value < 0:
                raise ConfigError(f"loss_fn_config {option}={value} must be a number of at least 0")
        merged = {**known, **options}
        missing = [option for option, value in merged.items() if value is None]
        if missing:
            raise ConfigError(f"loss_fn={name} needs loss_fn_config with {', '.join(missing)}")
        self.options: Options = {option: value or 0.0 for option, value in merged.items()}
        self.logprobs: dict[int, Tensor] = {}  # (N,) or (N, K) by the number of the datum

    def values(self, batch: Batch, current: TokenOutputs) -> Tensor:
        """Return the loss of each token, and keep the log-probs."""
        rows = batch.rows["index"].tolist()
        parts = current.logprobs.detach().float().cpu().split(batch.response.lengths.tolist())
        self.logprobs.update(zip(rows, parts, strict=True))
        return self.tinker_loss.function(batch, current.logprobs, self.options)

    # ---- what a policy asks an objective for

    def view(self, step: int) -> View:
        return FULL

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        return self.values(batch, current).sum()

    def row_groups(self, batch: Batch) -> Sequence[int] | None:
        return None

    def target_ids(self, batch: Batch) -> Tensor:
        return batch.tokens["target_tokens"]

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        return {}


def _names() -> str:
    return ", ".join(LOSSES)


def make_batch(data: list[Datum], loss: str, vocabulary_size: int, context: int) -> Batch:
    """Return the data as a batch whose rows have one response token per position.

    Position i of a datum is the token after `tokens[:i + 1]`; its target may be any other token.

    Raises:
        ConfigError: an array is missing, has another length, or values out of range.
    """
    if not data:
        raise ConfigError("forward_backward needs at least one datum; data is empty")
    for number, datum in enumerate(data):
        _check_datum(f"data[{number}]", datum, loss, vocabulary_size, context)
    shapes = {datum.inputs["target_tokens"].shape[1:] for datum in data}
    if len(shapes) > 1:
        raise ConfigError("target_tokens has different numbers of columns; send them separately")
    rows: list[Trajectory] = []
    for number, datum in enumerate(data):
        # The model never reads the last response token; it only has to be a valid id.
        response = [*datum.tokens[1:], datum.tokens[-1]]
        rows.append(Trajectory("", datum.tokens[:1], response, group=number, index=number))
    batch = Batch.of(rows)
    for name in ("target_tokens", *LOSSES[loss].inputs):
        column = np.concatenate([datum.inputs[name] for datum in data])
        dtype = torch.int64 if name == "target_tokens" else torch.float32
        batch.tokens[name] = torch.tensor(column, dtype=dtype)
    return batch


def _check_datum(where: str, datum: Datum, loss: str, vocabulary_size: int, context: int) -> None:
    length = len(datum.tokens)
    if not 0 < length <= context:
        raise ConfigError(f"{where}: model_input has {length} tokens; it must have 1 to {context}")
    if loss == "cross_entropy" and "target_tokens" in datum.inputs:
        shape = datum.inputs["target_tokens"].shape
        datum.inputs.setdefault("weights", np.ones(shape, dtype=np.float32))
    wanted = ("target_tokens", *LOSSES[loss].inputs)
    if set(datum.inputs) != set(wanted):
        raise ConfigError(
            f"{where}: loss_fn_inputs has {', '.join(sorted(datum.inputs)) or 'nothing'}; "
            f"{loss} takes {', '.join(wanted)}"
        )
    shape = datum.inputs["target_tokens"].shape
    may_have_columns = loss == "cross_entropy" and len(shape) == 2 and shape[1] > 0
    if shape[0] != length or not (len(shape) == 1 or may_have_columns):
        raise ConfigError(
            f"{where}: target_tokens has shape {list(shape)}; it must be [{length}], the length "
            "of model_input, or with several targets per position (cross_entropy) [N, K]"
        )
    for name, array in datum.inputs.items():
        if array.shape != shape:
            raise ConfigError(f"{where}: {name} has shape {list(array.shape)}, not {list(shape)}")
        if not np.isfinite(array).all():
            raise ConfigError(f"{where}: {name} has a value that is not finite")
    for name, ids in (("model_input", datum.tokens), ("target_tokens", None)):
        values = np.asarray(datum.inputs[name] if ids is None else ids)
        if values.dtype.kind != "i" or values.min() < 0 or values.max() >= vocabulary_size:
            raise ConfigError(f"{where}: {name} has a token id outside 0 to {vocabulary_size - 1}")
