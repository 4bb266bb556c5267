"""The supplement on instruction tuning and preferences: packed data, answers of MMLU and GSM8K, the DPO loss of one pair."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from postgrad.algorithms.preference import dpo
from postgrad.data.readers import read_rows
from postgrad.data.render import Prompts
from postgrad.data.styles import STYLES
from postgrad.errors import ConfigError
from postgrad.problem import Problem, Score
from postgrad.toolkit.sequences import encode_text, get_response_log_probs
from postgrad.verifiers.answers import choice, last_number

LETTERS = "ABCD"


def alpaca(prompt: str, response: str) -> str:
    """The Alpaca text of one exchange. Nothing follows the response: a newline there would be learned in place of the end."""
    style = STYLES["alpaca_sft"]
    return f"{style.before}{prompt}{style.after}{response}"


def _document(prompts: Prompts, prompt: str, response: str) -> list[int]:
    """The Alpaca text with the tokenizer's BOS, then the end's id."""
    end = prompts.tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError("the tokenizer has no end-of-sequence token; set its eos_token")
    return [*encode_text(prompts, alpaca(prompt, response)), end]


class PackedSftDataset(Dataset[dict[str, Tensor]]):
    """Documents of a JSONL file (.jsonl, .jsonl.gz) with `prompt` and `response`, joined and cut into rows of one length.

    Row i holds `input_ids` (seq_length,) int64, tokens i · seq_length onwards of the joined documents, and `labels`, the same one
    token later. The remainder is dropped: (tokens - 1) // seq_length rows. With `shuffle` the documents come in an order drawn
    from torch's global generator.

    Raises: ConfigError for a file that cannot be read or a row without prompt or response; ValueError for seq_length below 1.
    """

    def __init__(
        self, tokenizer: Any, dataset_path: str | os.PathLike[str], seq_length: int, shuffle: bool
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length is {seq_length}; a row has at least one token")
        self.seq_length = seq_length
        prompts, documents = Prompts(tokenizer, "plain"), []
        for place, row in read_rows(Path(dataset_path)):
            prompt, response = row.get("prompt"), row.get("response")
            if not isinstance(prompt, str) or not isinstance(response, str):
                raise ConfigError(
                    f"{dataset_path}: {place}: no text in prompt or response; each row needs both"
                )
            documents.append(torch.tensor(_document(prompts, prompt, response)))
        order = torch.randperm(len(documents)).tolist() if shuffle else range(len(documents))
        self.tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(documents[i] for i in order)])

    def __len__(self) -> int:
        return max(0, (self.tokens.numel() - 1) // self.seq_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index % len(self) * self.seq_length
        window = self.tokens[start : start + self.seq_length + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def get_packed_sft_dataset(
    tokenizer: Any, dataset_path: str | os.PathLike[str], seq_length: int, shuffle: bool
) -> PackedSftDataset:
    """PackedSftDataset under the course's name."""
    return PackedSftDataset(tokenizer, dataset_path, seq_length, shuffle)


def iterate_batches(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """One epoch: each row once, ceil(rows / batch_size) batches, the last one maybe short. The result has a length."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def parse_mmlu_response(mmlu_example: dict[str, Any], model_output: str) -> str | None:
    """The letter A to D that the output names as its answer, or None. The letter counts, never the text of an option.

    It is the letter for which the verifier `choice` would give the output a point.
    """
    for letter in LETTERS:
        score = choice(model_output, Problem("mmlu", (), letter))
        if isinstance(score, Score) and score.value > 0:
            return letter
    return None


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of the output, without currency, thousands commas and per-cent sign, or None when there are no digits.

    "$1,234.50." gives "1234.50", "3/4" stays a fraction. Compare as numbers: it may be "72.0".
    """
    found = last_number(model_output)
    if found is None:
        return None
    for sign in ("\\", "$", ",", "%"):
        found = found.replace(sign, "")
    return found.replace("−", "-")


def compute_per_instance_dpo_loss(
    lm: nn.Module,
    lm_ref: nn.Module,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """Scalar on lm's device: -log σ(β · ((lp_w - lp_l) - (ref_w - ref_l))) of one pair.

    lp is the log-prob of the whole Alpaca text with its end; the prompt's part cancels. The reference may be on another device
    and runs without gradient.
    """
    prompts = Prompts(tokenizer, "plain")
    pair = [
        _document(prompts, prompt, response) for response in (response_chosen, response_rejected)
    ]
    chosen, rejected = (_log_prob(lm, ids) for ids in pair)
    with torch.no_grad():
        reference_chosen, reference_rejected = (
            _log_prob(lm_ref, ids).to(chosen.device) for ids in pair
        )
    return dpo(chosen, rejected, reference_chosen, reference_rejected, beta=beta).values[0]


def _log_prob(model: nn.Module, ids: list[int]) -> Tensor:
    """(1,) the log-prob of a token sequence after its first token."""
    row = torch.tensor([ids], device=next(model.parameters()).device)
    return get_response_log_probs(model, row[:, :-1], row[:, 1:])["log_probs"].sum(1)
