"""The policy: log-probs of a batch under a view, one update, weights out and in.

`LocalPolicy` runs in this process; port.py has its port. What to optimize is an `Objective`, which
a method implements; this file knows no loss by name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from postgrad.config.schema import Config
from postgrad.errors import RunError, UnknownName, WrongValue, did_you_mean
from postgrad.model.checkpoint_files import File, FolderFile, write_files
from postgrad.model.device import DTYPES, copy_async, peak_memory_bytes
from postgrad.model.load.formats import Loaded, auto_class_of
from postgrad.model.lora import (
    adapter_parameters,
    adapters_disabled,
    read_adapter,
    save_adapter,
)
from postgrad.model.metrics import MetricAccumulator, TokenStats
from postgrad.model.one_rank import OneRank
from postgrad.model.optimizers.optimizer import learning_rate
from postgrad.model.passes.captured import GraphCache, compute_hidden_states
from postgrad.model.passes.head import head_of, model_outputs, top_logprobs
from postgrad.model.passes.layout import MicroBatch
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import support_of
from postgrad.model.passes.vocabulary import vocabulary_of
from postgrad.model.port import FULL, TokenOutputs, View
from postgrad.model.views import unused_parameters
from postgrad.types import Batch, MissingColumnError
from postgrad.user_code import place_of

if TYPE_CHECKING:
    from postgrad.model.parallel.ranks import Ranks


class Objective(Protocol):
    """What a method decides in the model's process. Built there from the configuration."""

    def view(self, step: int) -> View: ...

    def prepare(self, batch: Batch) -> Batch: ...

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor: ...

    def row_groups(self, batch: Batch) -> Sequence[int] | None: ...

    def target_ids(self, batch: Batch) -> Tensor: ...

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]: ...


class TopTokens(NamedTuple):
    """The most likely tokens at each response token, (tokens, num_top) each."""

    ids: Tensor
    logprobs: Tensor


class FrozenPolicy:
    """A model that computes log-probs and is never trained, such as the reference model.

    It is also the part of a trainable policy that computes log-probs. With `ranks` the model is
    sharded over them; `masters` and `head` are those of `hold`.
    """

    Outputs: ClassVar[Any] = TokenOutputs  # what forward() returns, one column per field

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        ranks: "Ranks | None" = None,
        masters: bool = False,
        head: nn.Module | None = None,
    ) -> None:
        self.config = config
        self.loaded = loaded
        self.model = loaded.model
        self.width = int(self.model.config.get_text_config().hidden_size)
        self.ranks = _hold(config, loaded, ranks, masters, head)
        self.device = self.ranks.device
        self.graph_cache = GraphCache(self.model)

    @torch.no_grad()
    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        columns = {name: torch.zeros(batch.num_tokens) for name in self.Outputs._fields}
        for micro in self.micro_batches(batch):
            positions = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            targets = batch.response.values[positions].to(self.device)
            kept = SampledSupport.of(batch, micro.rows, self.device)
            outputs = self.forward(micro.to(self.device), targets, view, kept)
            for name, values in outputs._asdict().items():
                columns[name][positions] = values.cpu()
        return self.ranks.gather(columns)

    @torch.no_grad()
    def top_logprobs(self, batch: Batch, num_top: int) -> dict[str, Tensor]:
        """Return (tokens, num_top) `ids` of the most likely tokens and their `logprobs`.

        At the rollout temperature, without gradient; fewer columns if the vocabulary is smaller.
        """
        vocabulary = vocabulary_of(self.model)
        num_rows = vocabulary.total if vocabulary else len(head_of(self.model).weight)
        num_ids = min(len(self.loaded.tokenizer), num_rows)
        shape = (batch.num_tokens, min(num_top, num_ids))

        def compute(micro: MicroBatch, targets: Tensor, kept: SampledSupport | None) -> TopTokens:
            head = head_of(self.model)
            top = top_logprobs(
                self.response_states(micro, FULL),
                head.weight,
                shape[1],
                num_ids,
                self.config.rollout.temperature,
                support_of(self.model).transform,
                vocabulary,
                head.bias,
            )
            return TopTokens(*top)

        table = {"ids": torch.zeros(shape, dtype=torch.int64), "logprobs": torch.zeros(shape)}
        for micro in self.micro_batches(batch):
            positions = batch.response.positions(torch.tensor(micro.rows, dtype=torch.int64))
            targets = batch.response.values[positions].to(self.device)
            top = self.ranks.run(compute, micro.to(self.device), targets)
            for name, values in top._asdict().items():
                table[name][positions] = values.cpu()
        return self.ranks.gather(table)

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Return the forward passes over the rows that this process computes."""
        return self.graph_cache.plan_passes(self.ranks.micro_batches(batch, row_groups))

    def forward(
        self, micro: MicroBatch, targets: Tensor, view: View, kept: SampledSupport | None = None
    ) -> Any:
        """Return the outputs of the micro-batch's response tokens, in the order of its rows."""
        return self.ranks.run(partial(self.compute, view), micro, targets, kept)

    def compute(
        self, view: View, micro: MicroBatch, targets: Tensor, kept: SampledSupport | None
    ) -> Any:
        """Return the outputs of a pass, or of this rank's tokens of it."""
        states = self.response_states(micro, view)
        return model_outputs(self.model, states, targets, self.config.rollout.temperature, kept)

    def response_states(self, micro: MicroBatch, view: View) -> Tensor:
        """Return the (tokens, width) states that predict the response tokens."""
        hidden = compute_hidden_states(self.model, micro, view, self.graph_cache)
        return hidden.flatten(0, 1)[micro.gather]


class BaseModelPolicy:
    """The base model of a policy with adapters: the same weights, with the adapters disabled."""

    def __init__(self, policy: FrozenPolicy) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.logprobs(batch, view)

    def top_logprobs(self, batch: Batch, num_top: int) -> dict[str, Tensor]:
        with adapters_disabled(self.policy.model):
            return self.policy.top_logprobs(batch, num_top)


class LocalPolicy(FrozenPolicy):
    """The policy in this process. The native engine samples from the same `loaded.model`.

    If the model has LoRA adapters, only they are trained. `weights()` and `policy/` have them
    merged. With `ranks` this process holds the shards of one rank.
    """

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        objective: Objective,
        ranks: "Ranks | None" = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__(config, loaded, ranks, masters=True, head=head)
        self.objective = objective
        self.has_adapters = bool(adapter_parameters(self.model))
        names = [name for name, _ in self.model.named_parameters()]
        scales = objective.lr_scales(names)
        check_scales(scales, names)
        # A learning-rate scale of 0 freezes a parameter; adapters freeze the rest of the model.
        self.frozen: list[nn.Parameter] = []
        for name, p in self.model.named_parameters():
            if scales.get(name) == 0.0 or not p.requires_grad:
                self.frozen.append(p)
        for p in self.frozen:
            p.requires_grad_(False)
        self.num_frozen = len(self.frozen)
        modules = self.trained_modules()
        self.optimizer = self.ranks.make_optimizer(modules, config.optimizer, scales)
        self.graph_cache = GraphCache(self.model, self.optimizer.masters_by_id())
        self.stats = TokenStats()
        self.weights_version = 0  # counts how often the weights changed

    def trained_modules(self) -> nn.Module:
        """Return what the optimizer updates; its files have the names of these parameters."""
        return self.model

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        self.weights_version += 1
        lr = learning_rate(self.config.optimizer, step, self.config.training.steps)
        view = self.objective.view(step)
        self._freeze_unused(view)
        # Random numbers of an update follow from the step, so a resumed run draws the same ones.
        torch.manual_seed((self.config.seed << 20) + step + (self.ranks.rank << 50))
        metrics = MetricAccumulator()
        step_metrics = MetricAccumulator()
        self.stats = TokenStats(batch)
        numbered = self.stats.number_rows(batch)
        for _ in range(self.config.training.ppo_epochs):
            for part in split_updates(numbered, self.config.training.updates_per_step):
                loss = self.accumulate(self.objective.prepare(part), view, metrics)
                if self.optimizer.has_gradients():
                    self._optimizer_step(lr, loss, step_metrics)
            self.stats.close()
        memory_gib = peak_memory_bytes(self.device) / 2**30
        metrics.peak("memory_gib", torch.tensor(memory_gib, dtype=torch.float64))
        return {"lr": lr, **self.ranks.gather_metrics(metrics).result(), **step_metrics.result()}

    def _optimizer_step(self, lr: float, loss: Tensor, metrics: MetricAccumulator) -> None:
        norm = self.optimizer.step(lr)
        check_loss(loss, norm)
        metrics.mean("grad_norm", torch.tensor([norm]))
        max_norm = self.config.optimizer.skip_grad_norm
        if max_norm is not None:
            metrics.total("updates_skipped", float(not norm <= max_norm))

    def accumulate(self, batch: Batch, view: View, metrics: MetricAccumulator) -> Tensor:
        """Add the gradient of one optimizer step's batch; return the loss of this process's rows.

        Its loss weights are global, so order and size of the micro-batches do not matter.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in self.micro_batches(batch, self.objective.row_groups(batch)):
            rows = batch.select(micro.rows).map_tensors(
                lambda column: copy_async(column, self.device)
            )
            kept = SampledSupport.of(batch, micro.rows, self.device)
            targets = self.objective.target_ids(rows)
            current = self.forward(micro.to(self.device), targets, view, kept)
            if not micro.rows:  # an idle pass: only the collectives of other ranks need this one
                current[0].sum().backward()
                continue
            self.stats.add(batch, micro.rows, current)
            loss = checked_loss(self.objective, rows, current, metrics)
            loss.backward()
            metrics.total("loss", loss)
            total += loss.detach().sum()
            # A live autograd graph holds gradient nodes of the default stream, which must not
            # exist when a later pass is captured.
            del loss, current
        return total

    def token_stats(self) -> dict[str, Tensor]:
        own = self.stats.columns()
        counts = self.ranks.gather({name: (~own[name].isnan()).float() for name in own})
        values = self.ranks.gather({name: own[name].nan_to_num() for name in own})
        return {name: values[name].where(counts[name] > 0, torch.nan) for name in own}

    def _freeze_unused(self, view: View) -> None:
        """Disable the gradients of what the view does not use, and of what is always frozen."""
        frozen = {id(p) for p in [*unused_parameters(self.model, view), *self.frozen]}
        if len(frozen) != self.num_frozen:
            for p in self.model.parameters():
                p.requires_grad_(id(p) not in frozen)
            self.num_frozen = len(frozen)

    def weights(self) -> dict[str, Tensor]:
        return self.ranks.weights()

    def files(self, folder: Path) -> list[File]:
        """Return this rank's files of a checkpoint."""
        files = self.ranks.model_files(folder / "policy")
        files += self.optimizer.files(folder / "optimizer.safetensors")
        return files + self.adapter_files(folder / "adapter")

    def adapter_files(self, folder: Path) -> list[File]:
        """Return the adapter's files in peft's format; none without an adapter."""
        if not self.has_adapters:
            return []
        dtype = DTYPES[self.config.model.dtype]
        adapter = self.ranks.full_tensors(adapter_parameters(self.model), dtype)
        if not self.ranks.is_first:
            return []
        return [FolderFile(save_adapter, self.loaded, adapter, folder)]

    def save(self, folder: str) -> None:
        write_files(self.files(Path(folder)))

    def load(self, folder: str) -> None:
        self.weights_version += 1
        self.load_weights(Path(folder))
        self.optimizer.load(Path(folder) / "optimizer.safetensors")

    def load_weights(self, folder: Path) -> None:
        """Read what a checkpoint holds of the weights that are trained."""
        if self.has_adapters:
            adapters = adapter_parameters(self.model)
            self.ranks.load(adapters, lambda: read_adapter(self.model, folder / "adapter"))
        else:
            parameters = dict(self.model.named_parameters())
            self.ranks.load(parameters, lambda: read_weights(folder / "policy", parameters))


def read_weights(folder: Path, names: Iterable[str], loader: str = "") -> dict[str, Tensor]:
    """Return the weights of a saved folder by parameter name; `names` are those needed.

    Some models are stored under other names, such as experts one by one; transformers then
    translates the names. `loader` is the auto class that does; by default a language model's.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(file))
    if any(name not in tensors for name in names):
        import transformers

        if loader:
            auto_class = getattr(transformers, loader)
        else:
            auto_class = auto_class_of(transformers.AutoConfig.from_pretrained(folder))
        model = auto_class.from_pretrained(folder, dtype="auto")
        tensors |= dict(model.named_parameters())
    return tensors


def check_scales(scales: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise ConfigError for scales of unknown parameters, or negative ones."""
    for name, scale in scales.items():
        if name not in names:
            raise UnknownName(
                f"lr_scales names the parameter {name}, which the model does not have; "
                f"{did_you_mean(name, names)}",
                at="lr_scales",
            )
        if not 0 <= scale < math.inf:
            raise WrongValue(
                f"lr_scales gives {name} the factor {scale}; it must be 0 or more", at="lr_scales"
            )


def split_updates(batch: Batch, num_updates: int) -> list[Batch]:
    """Split the batch into optimizer steps, group by group in order; a group is never split.

    The result has its own columns: what is added or changed here is not visible to the caller, nor
    in the next epoch, so a policy in this process behaves like one in another.
    """
    if num_updates == 1:
        return [batch.select(torch.arange(len(batch)))]
    groups = batch.rows["group"].tolist()
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    update = torch.tensor([order[group] * num_updates // len(order) for group in groups])
    parts: list[Batch] = []
    for i in range(num_updates):
        rows = torch.nonzero(update == i)[:, 0]
        if len(rows):
            parts.append(batch.select(rows))
    return parts


# ---- the loss of a method on a micro-batch, checked, so that a mistake in it is one line

# Token columns that some steps do not have, and what to write instead.
ABSENT = {
    "old_logprobs": "a step with one update computes none: use "
    'batch.tokens.get("old_logprobs", current.logprobs.detach()), or override token_losses instead',
    "reference_logprobs": "set method.kl=loss (or method.kl=reward), which computes it",
}


class HasLoss(Protocol):
    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor: ...


def checked_loss(
    objective: HasLoss, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
) -> Tensor:
    """Return the objective's loss.

    Raises: RunError if it reads a column that the batch does not have, or is not one number with a
        gradient.
    """
    name = f"{type(objective).__qualname__}.loss"
    try:
        loss = objective.loss(batch, current, metrics)
    except MissingColumnError as error:
        raise RunError(f"{name}: {error}{_hint(error, batch)}{place_of(error)}") from error
    except AttributeError as error:
        if error.obj is not objective:
            raise
        kind = type(objective).__qualname__
        raise RunError(
            f"{kind} has no attribute {error.name}{place_of(error)}; a loss sees the batch and the "
            f'configuration: set a column in a stage, such as batch.rows["{error.name}"]'
        ) from error
    _check(loss, name)
    return loss


def check_loss(loss: Tensor, grad_norm: float) -> None:
    """Raise RunError for an update whose loss is not finite although its gradient is."""
    if math.isfinite(grad_norm) and not torch.isfinite(loss):
        raise RunError(
            f"the loss is {float(loss)} although the gradient norm is {grad_norm:.3g}; look for a "
            "logarithm, a root or a division in the loss or the critic's targets that fails for "
            "some tokens"
        )


def _hint(error: MissingColumnError, batch: Batch) -> str:
    if error.kind == "token" and error.name in ABSENT:
        return f"; {ABSENT[error.name]}"
    if error.kind == "token" and error.name in batch.rows:
        return f'; it is a row column: use batch.expand(batch.rows["{error.name}"])'
    return ""


def _check(loss: Any, name: str) -> None:
    if not isinstance(loss, Tensor):
        raise RunError(f"{name} returned {type(loss).__name__}; return a tensor with one number")
    if loss.numel() != 1:
        raise RunError(
            f"{name} returned a tensor of the shape {tuple(loss.shape)}; return the sum of its "
            'values times batch.tokens["loss_weight"]'
        )
    if not loss.requires_grad:
        raise RunError(
            f"{name} returned a number without gradient; compute it from current.logprobs without "
            "detach()"
        )


def _hold(
    config: Config,
    loaded: Loaded,
    ranks: "Ranks | None",
    masters: bool,
    head: nn.Module | None = None,
) -> OneRank:
    """Return how this process holds a model: all of it, or with ranks its shards.

    `masters` keeps shards in float32, to be trained. `head` is sharded too and computes in float32.
    """
    if ranks is None:
        return OneRank(config, loaded)
    from postgrad.model.parallel.sharded import ShardedModel

    return ShardedModel(config, loaded, ranks, masters, head)
