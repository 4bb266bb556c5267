"""The base model behind all training clients: training passes, optimizer steps, sampling.

Not safe for threads: only the worker's thread calls it.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from postgrad.config.schema import Config, ModelConfig, OptimizerConfig, RolloutConfig
from postgrad.doctor.machine import memory_bytes
from postgrad.errors import ConfigError
from postgrad.model.device import (
    choose_device,
    choose_dtype,
    free_memory_bytes,
    has_own_memory,
)
from postgrad.model.load import base_model_name, load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.layout import default_token_budget
from postgrad.model.policy import FrozenPolicy, LocalPolicy
from postgrad.model.views import FULL
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.serving.tinker.adapters import Adapter, AdapterSlots, LoraShape, read_tensors
from postgrad.serving.tinker.losses import LossObjective, make_batch
from postgrad.serving.tinker.messages import Datum, Sample
from postgrad.types import Batch, Trajectory

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINING_BYTES = 16  # per parameter of an adapter: value, gradient and AdamW's state in float32
EMPTY_LOGPROB = -99999.0  # the client reads it as: no entry


@dataclass(eq=False)
class TrainedAdapter:
    """An adapter that is being trained, with the passes and the optimizer over its matrices."""

    adapter: Adapter
    policy: LocalPolicy
    has_pass: bool = False  # forward_backward was called since the last optimizer step


@dataclass(frozen=True, eq=False)
class SamplerWeights:
    """An adapter's matrices at one time, in host memory; training does not change them."""

    shape: LoraShape
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class AdamStep:
    """What one step of AdamW uses. `grad_clip_norm` 0: no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue, and the log-probs that are wanted besides those of the samples."""

    prompt: list[int]
    seeds: list[int]
    max_tokens: int
    prompt_logprobs: bool = False
    num_scored: int | None = None  # only the last tokens of the prompt; None: all but the first
    num_top_prompt: int = 0
    num_top: int = 0


@dataclass
class SampleResult:
    """The samples of one request. Prompt log-probs are (N,), NaN at the first token."""

    samples: list[Sample]
    prompt_logprobs: np.ndarray | None = None
    top_prompt: tuple[np.ndarray, np.ndarray] | None = None


class TrainedModel:
    """One base model, its engine, and the adapters that are mounted in turn.

    Args:
        config: the model; its device and dtype are resolved in place.
        context: longest prompt plus response, in tokens; 0: the model's limit.
        rows: samples decoded at the same time; 0 chooses.

    Raises:
        ConfigError: the model cannot be loaded, or the native engine cannot sample it.
    """

    def __init__(self, config: ModelConfig, context: int = 0, rows: int = 0) -> None:
        device = choose_device(config.device)
        config.device = device.type
        is_cpu = config.dtype == "auto" and device.type == "cpu"
        config.dtype = "float32" if is_cpu else choose_dtype(config.dtype, device)
        rollout = RolloutConfig(max_rows=rows)
        self.config = Config(model=config, optimizer=OptimizerConfig(), rollout=rollout)
        self.config.training.token_budget = default_token_budget(device, eager=True)
        self.loaded = load(config, device)
        self.slots = AdapterSlots(self.loaded.model, base_model_name(config.path, 0))
        self.engine = NativeEngine(self.loaded, self.config.rollout)
        if self.engine.stock_engine is not None:
            raise ConfigError(
                f"model {config.path} cannot be trained by this server: the native engine cannot "
                "sample it; train it with postgrad train and rollout.engine=hf"
            )
        if context > self.engine.max_context:
            raise ConfigError(f"--context {context} is more than {self.engine.max_context}")
        self.context = context or self.engine.max_context
        self.vocabulary_size = int(self.loaded.model.get_input_embeddings().weight.shape[0])
        self._sampling_adapters: dict[LoraShape, Adapter] = {}
        self._sampled: tuple[LoraShape | None, SamplerWeights | None] = (None, None)
        # Made while an adapter is mounted: passes of a model without adapters may be captured as
        # graphs, which would ignore adapters that are mounted later.
        self.slots.mount(self.slots.make_adapter(LoraShape(1)))
        self.scorer = FrozenPolicy(self.config, self.loaded)
        self.slots.mount(None)

    # ---- training

    def new_adapter(self, shape: LoraShape, seed: int) -> TrainedAdapter:
        """Return a new adapter with a new optimizer. Raises ConfigError: it does not fit."""
        self._check_memory(shape)
        adapter = self.slots.make_adapter(shape, seed)
        self.slots.mount(adapter)
        policy = LocalPolicy(self.config, self.loaded, LossObjective("cross_entropy", {}))
        return TrainedAdapter(adapter, policy)

    def _check_memory(self, shape: LoraShape) -> None:
        needed = TRAINING_BYTES * self.slots.num_parameters(shape)
        device = self.engine.device
        free = free_memory_bytes(device) if has_own_memory(device) else memory_bytes()[1]
        if needed > free:
            raise ConfigError(
                f"an adapter of rank {shape.rank} needs {needed / 2**30:.2f} GiB to train, and "
                f"{free / 2**30:.2f} GiB are free; use a lower rank, or close other clients"
            )

    def forward_backward(
        self,
        trained: TrainedAdapter,
        data: list[Datum],
        loss: str,
        options: dict[str, float],
        forward_only: bool = False,
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return each datum's log-probs and the metrics; add the gradient unless `forward_only`.

        Raises ConfigError for wrong data.
        """
        objective = LossObjective(loss, options)
        batch = make_batch(data, loss, self.vocabulary_size, self.context)
        self.slots.mount(trained.adapter)
        policy = trained.policy
        if forward_only:
            total = self._forward(policy, batch, objective)
        else:
            total = self._accumulate(trained, batch, objective)
        outputs = [objective.logprobs[number].numpy() for number in range(len(data))]
        return outputs, {"loss:sum": total}

    def _accumulate(self, trained: TrainedAdapter, batch: Batch, objective: LossObjective) -> float:
        """Add the gradient of a pass; return its loss.

        If the pass fails, all gradients are dropped: a part of them would be a wrong step.
        """
        metrics = MetricAccumulator()
        trained.policy.objective = objective
        try:
            trained.policy.accumulate(batch, FULL, metrics)
        except Exception:
            trained.policy.optimizer.adam.zero_grad(set_to_none=True)
            trained.has_pass = False
            raise
        trained.has_pass = True
        return metrics.result()["loss"]

    @torch.no_grad()
    def _forward(self, policy: LocalPolicy, batch: Batch, objective: LossObjective) -> float:
        """Return the loss of a pass without gradient."""
        total = 0.0
        for micro in policy.micro_batches(batch):
            rows = batch.select(micro.rows).to(policy.device)
            targets = objective.target_ids(rows)
            current = policy.forward(micro.to(policy.device), targets, FULL)
            total += float(objective.values(rows, current).double().sum())
        return total

    def optim_step(self, trained: TrainedAdapter, step: AdamStep) -> dict[str, float]:
        """Update the adapter with AdamW from the gradients so far, and clear them.

        Raises:
            ConfigError: forward_backward was not called before.
            RunError: the gradient is not finite.
        """
        if not trained.has_pass:
            raise ConfigError("there is no gradient; call forward_backward before optim_step")
        trained.has_pass = False
        optimizer = trained.policy.optimizer
        optimizer.config = dataclasses.replace(
            self.config.optimizer, max_grad_norm=step.grad_clip_norm
        )
        for group in optimizer.adam.param_groups:
            group["betas"] = (step.beta1, step.beta2)
            group["eps"] = step.eps
            group["weight_decay"] = step.weight_decay
        return {"grad_norm:mean": optimizer.step(step.learning_rate)}

    def save(self, trained: TrainedAdapter, folder: Path, with_optimizer: bool) -> None:
        """Write the adapter, in peft's format, and the optimizer to a folder."""
        self.slots.save(trained.adapter, folder)
        if with_optimizer:
            trained.policy.optimizer.save(folder / OPTIMIZER_FILE)

    def load(self, trained: TrainedAdapter, folder: Path, with_optimizer: bool) -> None:
        """Continue from what save() wrote; gradients are dropped.

        Without the optimizer's state, AdamW starts anew. Raises ConfigError: another shape.
        """
        trained.adapter.copy_from(self._checked(trained.adapter.shape, read_tensors(folder)))
        optimizer = trained.policy.optimizer
        optimizer.adam.zero_grad(set_to_none=True)
        trained.has_pass = False
        if with_optimizer:
            optimizer.load(folder / OPTIMIZER_FILE)
        else:
            optimizer.reset()

    def _checked(self, shape: LoraShape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wanted = self.slots.make_adapter(shape).tensors()
        is_same = tensors.keys() == wanted.keys()
        if not is_same or any(tensors[name].shape != one.shape for name, one in wanted.items()):
            raise ConfigError(
                "the checkpoint's adapter has another rank or other layers than this client; use "
                "create_training_client_from_state, which makes a client that fits"
            )
        return tensors

    # ---- sampling

    def snapshot(self, trained: TrainedAdapter) -> SamplerWeights:
        """Return a copy of an adapter's present matrices."""
        return SamplerWeights(trained.adapter.shape, trained.adapter.snapshot())

    def read_sampler(self, shape: LoraShape, folder: Path) -> SamplerWeights:
        """Return a saved adapter's matrices. Raises ConfigError: another shape."""
        return SamplerWeights(shape, self._checked(shape, read_tensors(folder)))

    def sample(
        self, weights: SamplerWeights | None, sampling: Sampling, requests: list[SampleRequest]
    ) -> list[SampleResult]:
        """Sample continuations with an adapter; None: from the base model."""
        self._mount_sampler(weights)
        prompts = [
            Request(request.prompt, request.seeds, request.max_tokens) for request in requests
        ]
        groups = self.engine.generate(prompts, sampling)
        results: list[SampleResult] = []
        for request, completions in zip(requests, groups, strict=True):
            samples = [Sample(one.tokens, one.logprobs, one.finish) for one in completions]
            result = SampleResult(samples)
            self._add_logprobs(request, result)
            results.append(result)
        return results

    def _mount_sampler(self, weights: SamplerWeights | None) -> None:
        """Mount the matrices for sampling and fill them with the weights.

        There is one set of matrices per shape, because captured decode graphs read their memory.
        """
        shape = weights.shape if weights else None
        slot: Adapter | None = None
        if weights is not None:
            if weights.shape not in self._sampling_adapters:
                made = self.slots.make_adapter(weights.shape).requires_grad_(False)
                self._sampling_adapters[weights.shape] = made
            slot = self._sampling_adapters[weights.shape]
        last_shape, last_weights = self._sampled
        if weights is not None and weights is not last_weights:
            slot.copy_from(weights.tensors)  # type: ignore[union-attr]
        self.slots.mount(slot)
        if shape != last_shape:
            self.engine.reset_decoder()
        self._sampled = (shape, weights)

    def _add_logprobs(self, request: SampleRequest, result: SampleResult) -> None:
        """Fill in the log-probs of the prompt and the most likely tokens, if wanted."""
        prompt = request.prompt
        if request.prompt_logprobs:
            result.prompt_logprobs = np.full(len(prompt), np.nan, dtype=np.float32)
        if len(prompt) > 1 and (request.prompt_logprobs or request.num_top_prompt):
            batch = Batch.of([Trajectory("", prompt[:1], prompt[1:])])
            if result.prompt_logprobs is not None:
                result.prompt_logprobs[1:] = self.scorer.logprobs(batch)["logprobs"].numpy()
            if request.num_top_prompt:
                ids, logprobs = self._top(batch, request.num_top_prompt)
                none = np.full((1, ids.shape[1]), EMPTY_LOGPROB, dtype=np.float32)
                result.top_prompt = (
                    np.concatenate([np.zeros_like(ids[:1]), ids]),
                    np.concatenate([none, logprobs]),
                )
        if request.num_scored is not None:
            num_blank = len(prompt) - request.num_scored
            if result.prompt_logprobs is not None:
                result.prompt_logprobs[:num_blank] = np.nan
            if result.top_prompt is not None:
                result.top_prompt[0][:num_blank] = 0
                result.top_prompt[1][:num_blank] = EMPTY_LOGPROB
        if request.num_top:
            for sample in result.samples:
                batch = Batch.of([Trajectory("", prompt, sample.tokens)])
                sample.top = self._top(batch, request.num_top)

    def _top(self, batch: Batch, count: int) -> tuple[np.ndarray, np.ndarray]:
        table = self.scorer.top_logprobs(batch, count)
        return table["ids"].numpy(), table["logprobs"].numpy()
