"""The critic: a model of its own that says how much reward is still to come, token by token.

The value of a response token is read where that token is predicted, so it judges the state before it. The value head starts at zero.
"""

import dataclasses
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import Config
from postgrad.model.async_writer import AsyncWriter, TensorsFile, WeightsFile, copy_to_host
from postgrad.model.load import save
from postgrad.model.loaded import Loaded
from postgrad.model.optimizer import Optimizer, learning_rate
from postgrad.model.passes.captured import GraphCache, compute_hidden_states
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.policy import MetricAccumulator, load_weights, split_updates
from postgrad.model.views import FULL
from postgrad.types import Batch


class Critic(Protocol):
    """A value model, wherever it lives."""

    def values(self, batch: Batch) -> Tensor:
        """(tokens,) value before each response token, without gradient."""
        ...

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train towards the batch's returns. Returns metrics."""
        ...

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...

    def begin_save(self, folder: str) -> None: ...

    def saved(self, wait: bool) -> bool: ...


class ValueObjective(Protocol):
    """What a method with a critic decides beside it."""

    def prepare_values(self, batch: Batch) -> Batch: ...

    def value_loss(self, batch: Batch, values: Tensor, metrics: MetricAccumulator) -> Tensor: ...


class LocalCritic:
    """The critic in this process."""

    def __init__(
        self, config: Config, loaded: Loaded, objective: ValueObjective, lr: float
    ) -> None:
        self.config, self.loaded, self.objective = config, loaded, objective
        self.device = next(loaded.model.parameters()).device
        self.width = int(loaded.model.config.get_text_config().hidden_size)
        self.head = nn.Linear(
            self.width, 1, device=self.device
        )  # float32, whatever the body computes in
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        body = nn.ModuleDict({"body": loaded.model.base_model, "value_head": self.head})
        self.optimizer_config = dataclasses.replace(config.optimizer, lr=lr)
        self.graph_cache = GraphCache(loaded.model)
        self.optimizer = self.make_optimizer(body)
        self.graph_cache = GraphCache(loaded.model, self.optimizer.masters_by_id())
        self.writer = AsyncWriter()

    def make_optimizer(self, body: nn.Module) -> Optimizer:
        return Optimizer(body, self.optimizer_config)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """The forward passes that cover the rows this process computes: here all of them."""
        return make_micro_batches(batch, self.config.training.token_budget, self.loaded.model)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns of which this process filled in its own rows, filled in for all rows."""
        return columns

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        """A tally of the rows this process computed, as one of all rows."""
        return metrics

    def forward(self, micro: MicroBatch) -> Tensor:
        hidden = compute_hidden_states(self.loaded.model, micro, FULL, self.graph_cache)
        return self.head(hidden.flatten(0, 1)[micro.gather].float())[:, 0]

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        out = torch.zeros(batch.num_tokens)
        for micro in self.micro_batches(batch):
            where = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            out[where] = self.forward(micro.to(self.device)).cpu()
        return self.gather({"values": out})["values"]

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        metrics, steps = MetricAccumulator(), MetricAccumulator()
        lr = learning_rate(self.optimizer_config, step, self.config.training.steps)
        for part in split_updates(batch, self.config.training.updates_per_step):
            part = self.objective.prepare_values(part)
            for micro in self.micro_batches(part):
                values = self.forward(micro.to(self.device))
                if (
                    not micro.rows
                ):  # others compute: this process only takes part in what they exchange
                    values.sum().backward()
                    continue
                loss = self.objective.value_loss(
                    part.select(micro.rows).to(self.device), values, metrics
                )
                loss.backward()
                metrics.total("critic/loss", float(loss.detach()))
                del loss, values  # see LocalPolicy.accumulate
            if self.optimizer.has_gradients():
                steps.mean("critic/grad_norm", torch.tensor([self.optimizer.step(lr)]))
        return {**self.gather_metrics(metrics).result(), **steps.result()}

    def save(self, folder: str) -> None:
        save(self.loaded, Path(folder) / "critic")
        save_file(
            {name: p.detach().cpu() for name, p in self.head.named_parameters()},
            Path(folder) / "critic" / "value_head.safetensors",
        )
        self.optimizer.save(Path(folder) / "critic_optimizer.safetensors")

    def begin_save(self, folder: str) -> None:
        files = [
            WeightsFile(
                self.loaded,
                copy_to_host(dict(self.loaded.model.named_parameters())),
                Path(folder) / "critic",
            ),
            TensorsFile(
                copy_to_host(dict(self.head.named_parameters())),
                Path(folder) / "critic" / "value_head.safetensors",
            ),
            TensorsFile(
                copy_to_host(self.optimizer.tensors()),
                Path(folder) / "critic_optimizer.safetensors",
            ),
        ]
        self.writer.start(files)

    def saved(self, wait: bool) -> bool:
        return self.writer.done(wait)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        load_weights(self.loaded.model, Path(folder) / "critic")
        self.head.load_state_dict(load_file(Path(folder) / "critic" / "value_head.safetensors"))
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")
