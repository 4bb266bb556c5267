"""A trainable model behind its port: log-probs of a batch under a view, one update, weights out and in.

`Policy` is the port; `LocalPolicy` is the one that lives in this process. What to optimize comes as an `Objective`, which a
method implements; no loss is known here by name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from postgrad.config.schema import Config
from postgrad.model.async_writer import AsyncWriter, TensorsFile, WeightsFile, on_host
from postgrad.model.device import copy_async, peak_memory_bytes
from postgrad.model.load import save
from postgrad.model.loaded import Loaded
from postgrad.model.lora import (
    adapter_parameters,
    adapters_disabled,
    load_adapter,
    merged_weights,
    save_adapter,
    save_merged,
)
from postgrad.model.optimizer import Optimizer, learning_rate
from postgrad.model.passes.captured import GraphCache, pass_states
from postgrad.model.passes.head import TokenOutputs, token_outputs
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.views import FULL, View, unused_parameters
from postgrad.types import Batch


class Policy(Protocol):
    """A model that can be asked and trained, wherever it lives."""

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        """(tokens,) `logprobs`, `entropy` and `sum_squares` of every response token at the rollout temperature, without gradient."""
        ...

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on the batch: `training.updates_per_step` optimizer steps. Returns metrics."""
        ...

    def token_stats(self) -> dict[str, Tensor]:
        """(tokens,) what the last update's forward passes saw of its batch: `entropy`; NaN in rows that they left out."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The compute weights, by parameter name."""
        ...

    def save(self, folder: str) -> None:
        """`policy/` as a stock Hugging Face folder, and the optimizer, under `folder`."""
        ...

    def load(self, folder: str) -> None:
        """Continue from what save() wrote."""
        ...

    def begin_save(self, folder: str) -> None:
        """Copy what save() writes to host memory now, and write it while other calls are answered."""
        ...

    def saved(self, wait: bool) -> bool:
        """Whether all of it is written. Raises what the writing met."""
        ...


class MetricAccumulator:
    """Metrics of one update as sums and counts, divided once at the end: no micro-batch or rank weighs more than its tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.totals: dict[str, Any] = {}
        self.peaks: dict[str, Any] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Average of `values`, where the mask is true."""
        values = values.detach().double()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        # Sums stay on the device, and nothing is picked by a mask: both would make the host wait for it.
        self.sums[name] = self.sums.get(name, 0.0) + torch.where(mask, values, 0.0).sum()
        self.counts[name] = self.counts.get(name, 0.0) + mask.sum()

    def total(self, name: str, value: float | Tensor) -> None:
        """A plain sum, such as a loss whose terms are weighted already."""
        self.totals[name] = self.totals.get(name, 0.0) + (
            value.detach().double() if isinstance(value, Tensor) else value
        )

    def peak(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Largest of `values`, where the mask is true."""
        values = values.detach() if mask is None else torch.where(mask, values.detach(), -torch.inf)
        if values.numel():
            self.peaks[name] = torch.maximum(
                values.max(), torch.as_tensor(self.peaks.get(name, -torch.inf))
            )

    def result(self) -> dict[str, float]:
        means = {
            name: float(self.sums[name]) / float(self.counts[name])
            for name in self.sums
            if self.counts[name] > 0
        }
        totals = {name: float(total) for name, total in self.totals.items()}
        return {
            **means,
            **totals,
            **{name: float(peak) for name, peak in self.peaks.items() if peak > -torch.inf},
        }

    def plain(self) -> dict[str, dict[str, float]]:
        """Everything as numbers, to be carried to another process."""
        kinds = {
            "sums": self.sums,
            "counts": self.counts,
            "totals": self.totals,
            "peaks": self.peaks,
        }
        return {
            kind: {name: float(value) for name, value in values.items()}
            for kind, values in kinds.items()
        }

    @staticmethod
    def merge(parts: Sequence[dict[str, dict[str, float]]]) -> "MetricAccumulator":
        """One tally of several that saw different rows."""
        out = MetricAccumulator()
        for part in parts:
            for mine, theirs in (
                (out.sums, part["sums"]),
                (out.counts, part["counts"]),
                (out.totals, part["totals"]),
            ):
                for name, value in theirs.items():
                    mine[name] = mine.get(name, 0.0) + value
            for name, value in part["peaks"].items():
                out.peaks[name] = max(out.peaks.get(name, -torch.inf), value)
        return out


class Passes:
    """What the forward passes of one update saw, kept on the device until somebody asks: no pass waits for a copy."""

    NUMBER = "row_number"  # a row's place in the update's batch; methods leave rows out and change their order

    def __init__(self, batch: Batch | None = None) -> None:
        self.response = None if batch is None else batch.response
        self.kept: list[tuple[Tensor, Tensor]] = []

    def numbered(self, batch: Batch) -> Batch:
        numbers = {self.NUMBER: torch.arange(len(batch))}
        return Batch(batch.prompt, batch.response, dict(batch.tokens), {**batch.rows, **numbers})

    def keep(self, batch: Batch, rows: Sequence[int], current: TokenOutputs) -> None:
        if self.NUMBER in batch.rows:
            self.kept.append(
                (batch.rows[self.NUMBER][torch.tensor(rows)], current.entropy.detach())
            )

    def columns(self) -> dict[str, Tensor]:
        """(tokens,) of the update's batch, NaN where no pass came by."""
        if self.response is None:
            return {}
        entropy = torch.full((self.response.values.numel(),), torch.nan)
        if self.kept:
            where = self.response.positions(torch.cat([rows for rows, _ in self.kept]))
            entropy[where] = torch.cat([values for _, values in self.kept]).float().cpu()
        return {"entropy": entropy}


class Objective(Protocol):
    """What a method decides beside the model. Built from the configuration wherever the model lives."""

    def view(self, step: int) -> View: ...

    def prepare(self, batch: Batch) -> Batch: ...

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor: ...

    def row_groups(self, batch: Batch) -> Sequence[int] | None: ...

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]: ...


class FrozenPolicy:
    """A model that answers and never learns: a reference, or the part of a policy that asks."""

    def __init__(self, config: Config, loaded: Loaded) -> None:
        self.config, self.loaded = config, loaded
        self.model = loaded.model
        self.device = next(self.model.parameters()).device
        self.width = int(self.model.config.get_text_config().hidden_size)
        self.graph_cache = GraphCache(self.model)

    @torch.no_grad()
    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        out = {name: torch.zeros(batch.num_tokens) for name in TokenOutputs._fields}
        for micro in self.micro_batches(batch):
            where = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            outputs = self.forward(
                micro.to(self.device), batch.response.values[where].to(self.device), view
            )
            for name, column in outputs._asdict().items():
                out[name][where] = column.cpu()
        return self.gather(out)

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """The forward passes that cover the rows this process computes: here all of them."""
        return make_micro_batches(batch, self.config.training.token_budget, self.model, row_groups)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns of which this process filled in its own rows, filled in for all rows."""
        return columns

    def forward(self, micro: MicroBatch, targets: Tensor, view: View) -> TokenOutputs:
        """Log-prob and entropy of the micro-batch's response tokens, in the order of its rows."""
        picked = pass_states(self.model, micro, view, self.graph_cache).flatten(0, 1)[micro.gather]
        return token_outputs(
            picked,
            self.model.get_output_embeddings().weight,
            targets,
            self.config.rollout.temperature,
        )


class BaseModelPolicy(FrozenPolicy):
    """What a policy with adapters was before them: the same weights, asked with the adapters off."""

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        with adapters_disabled(self.model):
            return super().logprobs(batch, view)


class LocalPolicy(FrozenPolicy):
    """The policy in this process. The native engine samples from the same `loaded.model`.

    Where the model has LoRA adapters, only they are trained; what leaves this process has them merged.
    """

    number = 0  # of this process among those that divide the rows

    def __init__(self, config: Config, loaded: Loaded, objective: Objective) -> None:
        super().__init__(config, loaded)
        self.objective = objective
        names = [name for name, _ in self.model.named_parameters()]
        scales = objective.lr_scales(names)
        # A share of 0 is no gradient at all; beside adapters the model has none either.
        self.frozen = [
            p
            for name, p in self.model.named_parameters()
            if scales.get(name) == 0.0 or not p.requires_grad
        ]
        self.adapted = bool(adapter_parameters(self.model))
        for p in self.frozen:
            p.requires_grad_(False)
        self.optimizer = self.make_optimizer(scales)
        self.graph_cache = GraphCache(self.model, self.optimizer.masters_by_id())
        self.behind = AsyncWriter()
        self.num_frozen = len(self.frozen)
        self.passes = Passes()

    def make_optimizer(self, scales: dict[str, float]) -> Optimizer:
        return Optimizer(self.model, self.config.optimizer, scales)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        lr = learning_rate(self.config.optimizer, step, self.config.training.steps)
        view = self.objective.view(step)
        self._freeze_above(view)
        metrics, steps, self.passes = MetricAccumulator(), MetricAccumulator(), Passes(batch)
        if (
            self.config.model.lora.dropout
        ):  # the only dice thrown here: they follow from the step, so a resumed run repeats them
            torch.manual_seed((self.config.seed << 20) + step + (self.number << 50))
        for part in split_updates(
            self.passes.numbered(batch), self.config.training.updates_per_step
        ):
            self.accumulate(self.objective.prepare(part), view, metrics)
            if self.optimizer.has_gradients():
                norm = self.optimizer.step(lr)
                steps.mean("grad_norm", torch.tensor([norm]))
                if (bound := self.config.optimizer.skip_grad_norm) is not None:
                    steps.total("updates_skipped", float(not norm <= bound))
        metrics.peak(
            "memory_gib", torch.tensor(peak_memory_bytes(self.device) / 2**30, dtype=torch.float64)
        )
        return {"lr": lr, **self.gather_metrics(metrics).result(), **steps.result()}

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        """A tally of the rows this process computed, as one of all rows."""
        return metrics

    def accumulate(self, batch: Batch, view: View, metrics: MetricAccumulator) -> None:
        """Add the gradient of one optimizer step's batch; its weights are global, so the order and size of micro-batches do not matter."""
        passes = self.micro_batches(batch, self.objective.row_groups(batch))
        for micro in passes:
            rows = batch.select(micro.rows).moved(lambda column: copy_async(column, self.device))
            current = self.forward(micro.to(self.device), rows.response.values, view)
            if not micro.rows:  # others compute: this process only takes part in what they exchange
                current.logprobs.sum().backward()
                continue
            self.passes.keep(batch, micro.rows, current)
            loss = self.objective.loss(rows, current, metrics)
            loss.backward()
            metrics.total("loss", loss)
            # A graph that is still alive holds gradient nodes of the default stream; the capture of a
            # later pass must not meet them.
            del loss, current

    def token_stats(self) -> dict[str, Tensor]:
        return self.passes.columns()

    def _freeze_above(self, view: View) -> None:
        above = {id(p) for p in [*unused_parameters(self.model, view), *self.frozen]}
        if len(above) != self.num_frozen:
            for p in self.model.parameters():
                p.requires_grad_(id(p) not in above)
            self.num_frozen = len(above)

    def weights(self) -> dict[str, Tensor]:
        return merged_weights(self.model)

    def save(self, folder: str) -> None:
        if self.adapted:
            save_merged(self.loaded, Path(folder) / "policy")
            save_adapter(self.model, Path(folder) / "adapter")
        else:
            save(self.loaded, Path(folder) / "policy")
        self.optimizer.save(Path(folder) / "optimizer.safetensors")

    def load(self, folder: str) -> None:
        if self.adapted:
            load_adapter(self.model, Path(folder) / "adapter")
        else:
            load_weights(self.model, Path(folder) / "policy")
        self.optimizer.load(Path(folder) / "optimizer.safetensors")

    def begin_save(self, folder: str) -> None:
        if (
            self.adapted
        ):  # files of three kinds, of which the adapter's are peft's to write: at once
            self.save(folder)
            return
        files = [
            WeightsFile(self.loaded, on_host(self.weights()), Path(folder) / "policy"),
            TensorsFile(on_host(self.optimizer.tensors()), Path(folder) / "optimizer.safetensors"),
        ]
        self.behind.start(files)

    def saved(self, wait: bool) -> bool:
        return self.behind.done(wait)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a saved folder into the model's own parameters."""
    tensors = read_weights(folder)
    for name, p in model.named_parameters():
        p.copy_(tensors[name])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a saved folder, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def split_updates(batch: Batch, parts: int) -> list[Batch]:
    """The batch cut into optimizer steps by group, in order; a group is never cut."""
    if (
        parts == 1
    ):  # a table of its own, so that columns set beside the model do not show on the driver, wherever the model lives
        return [Batch(batch.prompt, batch.response, dict(batch.tokens), dict(batch.rows))]
    groups = batch.rows["group"]
    order = {group: i for i, group in enumerate(dict.fromkeys(groups.tolist()))}
    share = [i * parts // len(order) for i in range(len(order))]
    part = torch.tensor([share[order[g]] for g in groups.tolist()])
    return [
        batch.select(torch.nonzero(part == i)[:, 0])
        for i in range(parts)
        if bool((part == i).any())
    ]
