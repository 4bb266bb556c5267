"""Reward models: stock sequence classifiers with one label, to score responses and to train.

`RewardModel` scores token ids with any such folder. `RewardPolicy` trains one: the blocks of the
policy's model with a score head in place of the LM head. The score of a response is read at its
last token, as transformers reads it from the saved folder.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from postgrad.config.schema import Config, ModelConfig
from postgrad.errors import ConfigError
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import load_classifier, load_tokenizer
from postgrad.model.lora import load_adapter, save_adapter
from postgrad.model.optimizers.optimizer import Optimizer
from postgrad.model.passes.captured import compute_hidden_states
from postgrad.model.passes.layout import MicroBatch, default_token_budget
from postgrad.model.passes.sampled_support import KeptIds
from postgrad.model.policy import LocalPolicy, Objective, read_weights
from postgrad.model.port import View
from postgrad.model.score_head import SCORE, read_score_head

AUTO_CLASS = "AutoModelForSequenceClassification"


class ScoreOutputs(NamedTuple):
    """(tokens,) the score that the text before each response token would get."""

    scores: Tensor


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
        self.pad_id = padding_id(load_tokenizer(config, seed))
        self.model.config.pad_token_id = self.pad_id
        self.device = device
        self.token_budget = default_token_budget(device)
        self.context = context_length(self.model.config)

    @torch.no_grad()
    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return (rows,) float32 scores; NaN for a row that is longer than the context.

        No row ends in padding.
        """
        scores = torch.full((len(rows),), torch.nan)
        for part, logits in self.passes(rows):
            scores[torch.tensor(part)] = logits[:, 0]
        return scores

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


class RewardPolicy(LocalPolicy):
    """A reward model in training. Its outputs are ScoreOutputs, saved as a stock classifier.

    A model folder that is already a sequence classifier keeps its score head; otherwise the head
    starts at random, from the run's seed.
    """

    Outputs = ScoreOutputs

    def __init__(self, config: Config, loaded: Loaded, objective: Objective) -> None:
        self.config = config
        parameter = next(loaded.model.parameters())
        width = int(loaded.model.config.get_text_config().hidden_size)
        # The head is float32, whatever the model's compute type is.
        self.head = nn.Linear(width, 1, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        # So small that scores start near 0. A larger head gives all responses a common score, and
        # the first steps then only center it.
        nn.init.normal_(self.head.weight, std=1 / (width + 1), generator=generator)
        self._read_head(read_score_head(config.model, config.seed))
        self.head.to(parameter.device)
        self.check_architecture(loaded)
        super().__init__(config, loaded, objective)

    @torch.no_grad()
    def _read_head(self, tensors: dict[str, Tensor]) -> None:
        """Copy the head from the tensors of a folder, if they have one of the right shape."""
        if SCORE in tensors and tensors[SCORE].shape == self.head.weight.shape:
            self.head.weight.copy_(tensors[SCORE])

    def make_classifier(self, loaded: Loaded) -> Any:
        """Return a stock classifier of the model's configuration, without weights."""
        from transformers import AutoModelForSequenceClassification

        config = copy.deepcopy(loaded.model.config)
        config.update({"num_labels": 1})
        config.pad_token_id = padding_id(loaded.tokenizer)
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)

    def check_architecture(self, loaded: Loaded) -> None:
        """Raise ConfigError if transformers has no such classifier for this model type."""
        names = {name for name, _ in loaded.model.base_model.named_parameters()}
        try:
            classifier = self.make_classifier(loaded)
        except ValueError as error:
            raise ConfigError(
                f"model.path: transformers has no {AUTO_CLASS} for "
                f"{loaded.model.config.model_type}; use another model"
            ) from error
        known = {name for name, _ in classifier.base_model.named_parameters()}
        if names != known or not hasattr(classifier, "score"):
            raise ConfigError(
                f"model.path: {AUTO_CLASS} of {loaded.model.config.model_type} has "
                "other blocks than its language model; use another model"
            )

    def make_optimizer(self, scales: dict[str, float]) -> Optimizer:
        modules = nn.ModuleDict({"body": self.model.base_model, "score": self.head})
        return Optimizer(modules, self.config.optimizer)

    def forward(
        self, micro: MicroBatch, targets: Tensor, view: View, kept: KeptIds | None = None
    ) -> Any:
        hidden = compute_hidden_states(self.model, micro, view, self.graph_cache)
        return ScoreOutputs(self.head(hidden.flatten(0, 1)[micro.gather].float())[:, 0])

    def save(self, folder: str) -> None:
        classifier = self.make_classifier(self.loaded)
        weights = {**self.weights(), SCORE: self.head.weight.detach()}
        known = classifier.state_dict().keys()
        state = {name: weight.cpu() for name, weight in weights.items() if name in known}
        classifier.load_state_dict(state, strict=False, assign=True)
        classifier.save_pretrained(Path(folder) / "policy")
        self.loaded.tokenizer.save_pretrained(Path(folder) / "policy")
        if self.has_adapters:
            save_adapter(self.model, Path(folder) / "adapter")
        self.optimizer.save(Path(folder) / "optimizer.safetensors")

    def begin_save(self, folder: str) -> None:
        self.save(folder)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        body = [
            name
            for name, _ in self.model.named_parameters()
            if name.startswith(self.model.base_model_prefix)
        ]
        tensors = read_weights(Path(folder) / "policy", [SCORE, *body], AUTO_CLASS)
        self._read_head(tensors)
        if self.has_adapters:
            load_adapter(self.model, Path(folder) / "adapter")
        else:
            for name, p in self.model.named_parameters():
                if name in tensors:  # all but the LM head
                    p.copy_(tensors[name])
        self.optimizer.load(Path(folder) / "optimizer.safetensors")
