"""The critic: a separate model that estimates the reward still to come, per token.

The value of a response token is read at the position that predicts it, so it is the value of the
state before the token. The value head starts as the score head of the model that the critic starts
from, if that is a reward model with one score, and else at zero.
"""

import dataclasses
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import Config
from postgrad.model.checkpoint_files import AsyncWriter, TensorsFile, WeightsFile, copy_to_host
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import save
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.optimizers.optimizer import Optimizer, learning_rate
from postgrad.model.passes.captured import GraphCache, compute_hidden_states
from postgrad.model.passes.layout import MicroBatch, make_micro_batches
from postgrad.model.policy import check_loss, load_weights, split_updates
from postgrad.model.port import FULL
from postgrad.model.score_head import VALUE_HEAD, read_value_head
from postgrad.types import Batch


class ValueObjective(Protocol):
    """What a method with a critic decides in the critic's process."""

    def prepare_values(self, batch: Batch) -> Batch: ...

    def value_loss(self, batch: Batch, values: Tensor, metrics: MetricAccumulator) -> Tensor: ...


class LocalCritic:
    """The critic in this process. `path` is where `loaded` comes from; empty: model.path."""

    def __init__(
        self, config: Config, loaded: Loaded, objective: ValueObjective, lr: float, path: str = ""
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.objective = objective
        self.device = next(loaded.model.parameters()).device
        self.width = int(loaded.model.config.get_text_config().hidden_size)
        # The head is float32, whatever the model's compute type is. Sharding moves that of a model
        # without weights.
        is_on_meta = self.device.type == "meta"
        self.head = nn.Linear(self.width, 1, device="cpu" if is_on_meta else self.device)
        self.initialize_head(path or config.model.path)
        self.optimizer_config = dataclasses.replace(config.optimizer, lr=lr)
        self.graph_cache = GraphCache(loaded.model)
        modules = nn.ModuleDict({"body": loaded.model.base_model, "value_head": self.head})
        self.optimizer = self.make_optimizer(modules)
        self.graph_cache = GraphCache(loaded.model, self.optimizer.masters_by_id())
        self.writer = AsyncWriter()

    @torch.no_grad()
    def initialize_head(self, path: str) -> None:
        """Copy the head of a critic or a reward model at the path; zero if there is none."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        settings = dataclasses.replace(self.config.model, path=path)
        head = read_value_head(settings, self.config.seed)
        if "weight" not in head or head["weight"].shape != self.head.weight.shape:
            return
        for name, tensor in head.items():
            self.head.get_parameter(name).copy_(tensor)

    def make_optimizer(self, modules: nn.Module) -> Optimizer:
        return Optimizer(modules, self.optimizer_config)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Return the forward passes over the rows that this process computes: here all rows."""
        micros = make_micro_batches(batch, self.config.training.token_budget, self.loaded.model)
        return self.graph_cache.plan_passes(micros)

    def gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """All-gather columns across ranks; here there is one rank, so nothing changes."""
        return columns

    def gather_metrics(self, metrics: MetricAccumulator) -> MetricAccumulator:
        """Merge the ranks' metrics; here there is one rank, so nothing changes."""
        return metrics

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the values of the micro-batch's response tokens, in the order of its rows."""
        hidden = compute_hidden_states(self.loaded.model, micro, FULL, self.graph_cache)
        return self.head(hidden.flatten(0, 1)[micro.gather].float())[:, 0]

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        values = torch.zeros(batch.num_tokens)
        for micro in self.micro_batches(batch):
            positions = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            values[positions] = self.forward(micro.to(self.device)).cpu()
        return self.gather({"values": values})["values"]

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        lr = learning_rate(self.optimizer_config, step, self.config.training.steps)
        metrics = MetricAccumulator()
        step_metrics = MetricAccumulator()
        for _ in range(self.config.training.ppo_epochs):
            for part in split_updates(batch, self.config.training.updates_per_step):
                loss = self.accumulate(self.objective.prepare_values(part), metrics)
                if self.optimizer.has_gradients():
                    grad_norm = self.optimizer.step(lr)
                    check_loss(torch.tensor(loss), grad_norm)
                    step_metrics.mean("critic/grad_norm", torch.tensor([grad_norm]))
        return {**self.gather_metrics(metrics).result(), **step_metrics.result()}

    def accumulate(self, batch: Batch, metrics: MetricAccumulator) -> float:
        """Add the gradient of one optimizer step's batch; return the loss of its rows."""
        total = 0.0
        for micro in self.micro_batches(batch):
            values = self.forward(micro.to(self.device))
            if not micro.rows:  # an idle pass: only the collectives of other ranks need this one
                values.sum().backward()
                continue
            rows = batch.select(micro.rows).to(self.device)
            loss = self.objective.value_loss(rows, values, metrics)
            loss.backward()
            total += float(loss.detach())
            metrics.total("critic/loss", float(loss.detach()))
            del loss, values  # see LocalPolicy.accumulate
        return total

    def save(self, folder: str) -> None:
        save(self.loaded, Path(folder) / "critic")
        head = {name: p.detach().cpu() for name, p in self.head.named_parameters()}
        save_file(head, Path(folder) / "critic" / VALUE_HEAD)
        self.optimizer.save(Path(folder) / "critic_optimizer.safetensors")

    def begin_save(self, folder: str) -> None:
        weights = copy_to_host(dict(self.loaded.model.named_parameters()))
        head = copy_to_host(dict(self.head.named_parameters()))
        optimizer = copy_to_host(self.optimizer.tensors())
        self.writer.start(
            [
                WeightsFile(self.loaded, weights, Path(folder) / "critic"),
                TensorsFile(head, Path(folder) / "critic" / VALUE_HEAD),
                TensorsFile(optimizer, Path(folder) / "critic_optimizer.safetensors"),
            ]
        )

    def saved(self, wait: bool) -> bool:
        return self.writer.done(wait)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        load_weights(self.loaded.model, Path(folder) / "critic")
        head = load_file(Path(folder) / "critic" / VALUE_HEAD)
        for name, p in self.head.named_parameters():
            p.copy_(head[name])
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")
