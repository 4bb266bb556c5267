"""Process reward models: stock token classifiers with two labels, wrong and right.

The score of a step is read at its last token. `StepModel` gives the probability that each step of a
response is right. `StepPolicy` trains such a model: the blocks of the policy's model with a head
whose one output is the difference of the two labels' logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.config.schema import ModelConfig
from postgrad.model.load import model_config
from postgrad.model.reward_model import RewardModel, RewardPolicy
from postgrad.model.score_head import BIAS, SCORE

SEPARATOR = "step_separator"  # entry of config.json; a folder without it uses a line break
LABELS = {0: "wrong", 1: "right"}


def scores_steps(config: ModelConfig, seed: int = 0) -> bool:
    """Return whether the model at config.path is a token classifier."""
    names = model_config(config, seed).architectures or []
    return any(name.endswith("ForTokenClassification") for name in names)


def separator_of(config: ModelConfig, seed: int = 0) -> str:
    """Return the text that ends each step for the process reward model at config.path."""
    return str(getattr(model_config(config, seed), SEPARATOR, "\n"))


class StepModel(RewardModel):
    """A frozen process reward model. Raises ConfigError for another kind of folder."""

    per_token = True

    @torch.no_grad()
    def step_scores(self, rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Tensor:
        """Return (steps,) float32 probabilities that a step is right, row after row.

        `ends[i]` has the number of ids of rows[i] up to the end of each step. The values are NaN
        for a row that is longer than the context.
        """
        values = [torch.full((len(of_row),), torch.nan) for of_row in ends]
        for part, logits in self.passes(rows):
            right = logits.softmax(-1)[:, :, 1]
            for number, i in enumerate(part):
                values[i] = right[number, torch.tensor(ends[i], dtype=torch.int64) - 1]
        return torch.cat(values) if values else torch.empty(0)


class StepPolicy(RewardPolicy):
    """A process reward model in training, saved as a stock token classifier.

    The saved logits are (0, score), so the probability of `right` is the sigmoid of the score.
    """

    auto_class = "AutoModelForTokenClassification"
    head_names = (SCORE, BIAS)

    def make_head(self, width: int) -> nn.Linear:
        head = nn.Linear(width, 1)
        nn.init.zeros_(head.bias)
        return head

    def head_state(self) -> dict[str, Tensor]:
        weight = self.head.weight.detach()
        bias = self.head.bias.detach()
        return {
            SCORE: torch.cat([torch.zeros_like(weight), weight]),
            BIAS: torch.cat([torch.zeros_like(bias), bias]),
        }

    def read_head(self, tensors: dict[str, Tensor]) -> None:
        weight = tensors.get(SCORE)
        if weight is None or weight.shape != (2, self.head.in_features):
            return
        self.head.weight.copy_((weight[1] - weight[0])[None])
        if BIAS in tensors:
            self.head.bias.copy_((tensors[BIAS][1] - tensors[BIAS][0])[None])

    def classifier_settings(self) -> dict[str, Any]:
        separator = self.config.method.step_separator
        return {"id2label": LABELS, "label2id": {}, SEPARATOR: separator}
