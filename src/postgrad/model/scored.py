"""Models with a scalar head in place of the LM head: critics and reward models.

A `ScoredModel` gives one number per response token: at the position that predicts the token, so it
is the value of the state before it. `LocalCritic` is trained towards returns, `RewardPolicy` on
pairs of responses. `RewardModel` scores texts with a stock sequence classifier and is never
trained; transformers reads its score at the last token.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from postgrad.config.schema import Config, ModelConfig
from postgrad.errors import Unsupported
from postgrad.model.checkpoint_files import File, FolderFile, TensorsFile
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import (
    load_classifier,
    load_tokenizer,
    resolve_path,
    save_weights,
)
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.layout import MicroBatch, default_token_budget
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.policy import LocalPolicy, Objective, read_weights
from postgrad.model.port import FULL, View
from postgrad.pictures import Picture
from postgrad.types import Batch

if TYPE_CHECKING:
    from postgrad.model.parallel.ranks import Ranks
    from postgrad.model.vision import Vision

AUTO_CLASS = "AutoModelForSequenceClassification"
SCORE = "score.weight"  # the head's name in transformers' classifiers
BIAS = "score.bias"
VALUE_HEAD = "value_head.safetensors"  # of a critic, with the tensors weight and bias


class ScoreOutputs(NamedTuple):
    """(tokens,) the score that the text before each response token would get."""

    scores: Tensor


class ScoredModel(LocalPolicy):
    """A trained model with a scalar head, which is float32 whatever the model's compute type is."""

    Outputs = ScoreOutputs
    HEAD = "score"  # the head's name in the optimizer's files

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        objective: Objective,
        head: nn.Linear,
        ranks: "Ranks | None" = None,
    ) -> None:
        device = next(loaded.model.parameters()).device
        # Sharding moves the head of a model without weights.
        self.head = head if device.type == "meta" else head.to(device)
        super().__init__(config, loaded, objective, ranks, head)

    def trained_modules(self) -> nn.Module:
        return nn.ModuleDict({"body": self.model.base_model, self.HEAD: self.head})

    def compute(
        self, view: View, micro: MicroBatch, targets: Tensor, kept: SampledSupport | None
    ) -> ScoreOutputs:
        return ScoreOutputs(self.head(self.response_states(micro, view).float())[:, 0])


def new_head(loaded: Loaded, bias: bool) -> nn.Linear:
    width = int(loaded.model.config.get_text_config().hidden_size)
    return nn.Linear(width, 1, bias=bias)


# ---- critics


class ValueObjective(Protocol):
    """What a method with a critic decides in the critic's process."""

    def prepare_values(self, batch: Batch) -> Batch: ...

    def value_loss(self, batch: Batch, values: Tensor, metrics: MetricAccumulator) -> Tensor: ...


class CriticLoss:
    """The value loss of a method, as the objective of a model of its own."""

    def __init__(self, objective: ValueObjective) -> None:
        self.objective = objective

    def view(self, step: int) -> View:
        return FULL

    def prepare(self, batch: Batch) -> Batch:
        return self.objective.prepare_values(batch)

    def loss(self, batch: Batch, current: Any, metrics: MetricAccumulator) -> Tensor:
        return self.objective.value_loss(batch, current.scores, metrics)

    def row_groups(self, batch: Batch) -> None:
        return None

    def target_ids(self, batch: Batch) -> Tensor:
        return batch.response.values

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        return {}


class LocalCritic(ScoredModel):
    """A model that estimates the reward still to come. `path` is where `loaded` comes from.

    The value head starts as that of a saved critic, or the score head of a reward model with one
    score, if the critic starts from one; otherwise at zero.
    """

    HEAD = "value_head"

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        objective: ValueObjective,
        lr: float,
        path: str = "",
        ranks: "Ranks | None" = None,
    ) -> None:
        head = new_head(loaded, bias=True)
        if ranks is None or ranks.is_first:
            model = dataclasses.replace(config.model, path=path or config.model.path)
            initialize_value_head(head, read_value_head(model, config.seed))
        optimizer = dataclasses.replace(config.optimizer, lr=lr)
        config = dataclasses.replace(config, optimizer=optimizer)
        super().__init__(config, loaded, CriticLoss(objective), head, ranks)

    def values(self, batch: Batch) -> Tensor:
        """Return (tokens,) the value before each response token."""
        return self.logprobs(batch)["scores"]

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        metrics = super().update(batch, step)
        for name in ("lr", "memory_gib"):  # they are the policy's
            del metrics[name]
        for name in ("loss", "grad_norm", "updates_skipped"):
            if name in metrics:
                metrics[f"critic/{name}"] = metrics.pop(name)
        return metrics

    def files(self, folder: Path) -> list[File]:
        critic = folder / "critic"
        files = self.ranks.model_files(critic)
        files += self.optimizer.files(folder / "critic_optimizer.safetensors")
        head = self.ranks.full_tensors(dict(self.head.named_parameters()), torch.float32)
        if self.ranks.is_first:
            files.append(TensorsFile(head, critic / VALUE_HEAD))
        return files

    def load(self, folder: str) -> None:
        critic = Path(folder) / "critic"
        parameters = dict(self.model.named_parameters())
        self.ranks.load(parameters, lambda: read_weights(critic, parameters))
        head = dict(self.head.named_parameters())
        self.ranks.load(head, lambda: load_file(critic / VALUE_HEAD))
        self.optimizer.load(Path(folder) / "critic_optimizer.safetensors")


@torch.no_grad()
def initialize_value_head(head: nn.Linear, tensors: dict[str, Tensor]) -> None:
    """Copy a head of one score; zero if there is none."""
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if "weight" in tensors and tensors["weight"].shape == head.weight.shape:
        for name, tensor in tensors.items():
            head.get_parameter(name).copy_(tensor)


def read_value_head(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return the weight, and the bias if there is one, that a critic at config.path starts from.

    They are those of a saved critic, or the score head of a reward model; {} for another model.
    """
    file = _local_folder(resolve_path(config.path, seed)) / VALUE_HEAD
    if file.is_file():
        return load_file(file)
    scores = read_score_head(config, seed)
    return {name.removeprefix("score."): tensor for name, tensor in scores.items()}


# ---- reward models


def read_score_head(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of the score head at config.path by name; {} if there is none.

    transformers drops them when it reads such a folder as a language model. A hub id is read from
    the download of a model that was loaded before.
    """
    folder = _local_folder(resolve_path(config.path, seed))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        opened: Any
        with safe_open(file, framework="pt") as opened:
            for name in {SCORE, BIAS}.intersection(opened.keys()):
                tensors[name] = opened.get_tensor(name)
    return tensors


def _local_folder(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:  # its files are not in the hub's cache
        return Path(path)


class RewardPolicy(ScoredModel):
    """A reward model in training, saved as a stock classifier.

    A model folder that is already a sequence classifier keeps its score head; otherwise the head
    starts at random, from the run's seed.
    """

    def __init__(self, config: Config, loaded: Loaded, objective: Objective) -> None:
        head = new_head(loaded, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        # So small that scores start near 0. A larger head gives all responses a common score, and
        # the first steps then only center it.
        nn.init.normal_(head.weight, std=1 / (head.in_features + 1), generator=generator)
        tensors = read_score_head(config.model, config.seed)
        if SCORE in tensors and tensors[SCORE].shape == head.weight.shape:
            with torch.no_grad():
                head.weight.copy_(tensors[SCORE])
        check_architecture(loaded)
        super().__init__(config, loaded, objective, head)

    def files(self, folder: Path) -> list[File]:
        classifier = make_classifier(self.loaded)
        weights = {**self.weights(), SCORE: self.head.weight.detach()}
        known = classifier.state_dict().keys()
        weights = {name: weight for name, weight in weights.items() if name in known}
        stock = Loaded(classifier, self.loaded.tokenizer)
        files: list[File] = [FolderFile(save_weights, stock, weights, folder / "policy")]
        files += self.adapter_files(folder / "adapter")
        return files + self.optimizer.files(folder / "optimizer.safetensors")

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        body: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if name.startswith(self.model.base_model_prefix):  # all but the LM head
                body[name] = p
        tensors = read_weights(folder / "policy", [SCORE, *body], AUTO_CLASS)
        self.head.weight.copy_(tensors[SCORE])
        if self.has_adapters:
            super().load_weights(folder)
        else:
            self.ranks.load(body, lambda: tensors)


def make_classifier(loaded: Loaded) -> Any:
    """Return a stock classifier of the model's configuration, without weights."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(loaded.model.config)
    config.update({"num_labels": 1})
    config.pad_token_id = padding_id(loaded.tokenizer)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def check_architecture(loaded: Loaded) -> None:
    """Raise ConfigError if transformers has no such classifier for this model type."""
    names = {name for name, _ in loaded.model.base_model.named_parameters()}
    try:
        classifier = make_classifier(loaded)
    except ValueError as error:
        raise Unsupported(
            f"model.path: transformers has no {AUTO_CLASS} for "
            f"{loaded.model.config.model_type}; use another model"
        ) from error
    known = {name for name, _ in classifier.base_model.named_parameters()}
    if names != known or not hasattr(classifier, "score"):
        raise Unsupported(
            f"model.path: {AUTO_CLASS} of {loaded.model.config.model_type} has "
            "other blocks than its language model; use another model"
        )


def padding_id(tokenizer: Any) -> int:
    """Return the id of the padding token; of the end of a text if the tokenizer has none.

    transformers reads the score at the last token that is not padding.
    """
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)


class RewardModel:
    """A frozen reward model that scores rows of token ids.

    Raises ConfigError for a folder that is not a sequence classifier with one label.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.model = load_classifier(config, device, seed)
        self.tokenizer = load_tokenizer(config, seed)
        self.pad_id = padding_id(self.tokenizer)
        self.model.config.pad_token_id = self.pad_id
        self.device = device
        self.token_budget = default_token_budget(device)
        self.context = context_length(self.model.config)

    @torch.no_grad()
    def scores(
        self, rows: Sequence[Sequence[int]], images: Sequence[tuple[Picture, ...]] = ()
    ) -> Tensor:
        """Return (rows,) float32 scores; NaN for a row that is longer than the context.

        No row ends in padding. `images` are the pictures of each row; () if none has any.
        """
        scores = torch.full((len(rows),), torch.nan)
        shown = {i for i, pictures in enumerate(images) if pictures}
        texts = [i for i in range(len(rows)) if i not in shown]
        for part, logits in self.passes([rows[i] for i in texts]):
            scores[torch.tensor([texts[number] for number in part])] = logits[:, 0]
        for i in shown:
            if len(rows[i]) <= self.context:
                scores[i] = self._score_with_pictures(rows[i], images[i])
        return scores

    @cached_property
    def vision(self) -> "Vision":
        from postgrad.model.vision import Vision
        from postgrad.picture_processor import PictureProcessor

        return Vision(self.model, PictureProcessor(self.tokenizer), trained=False)

    def _score_with_pictures(self, row: Sequence[int], pictures: tuple[Picture, ...]) -> float:
        ids = torch.tensor([row], device=self.device)
        inputs = self.vision.stock_inputs(self.model, ids, pictures)
        return float(self.model(input_ids=ids, **inputs).logits)

    def passes(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the indices of some rows and the float32 logits of these rows, padded.

        Rows that are longer than the context are left out.
        """
        fitting = [i for i, row in enumerate(rows) if len(row) <= self.context]
        for part in _within_budget(rows, fitting, self.token_budget):
            length = max(len(rows[i]) for i in part)
            ids = torch.full((len(part), length), self.pad_id)
            mask = torch.zeros(len(part), length, dtype=torch.int64)
            for number, i in enumerate(part):
                ids[number, : len(rows[i])] = torch.tensor(rows[i])
                mask[number, : len(rows[i])] = 1
            output = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
            yield part, output.logits.float().cpu()


def _within_budget(
    rows: Sequence[Sequence[int]], indices: Sequence[int], budget: int
) -> list[list[int]]:
    """Return the indices sorted by length, in parts of at most `budget` padded tokens."""
    parts: list[list[int]] = []
    for i in sorted(indices, key=lambda i: len(rows[i])):
        if parts and (len(parts[-1]) + 1) * len(rows[i]) <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts
