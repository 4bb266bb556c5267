"""The assignment's supplement on instruction tuning and preferences.

Packed SFT data, the parsing of MMLU and GSM8K answers, and the DPO loss of one pair.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from postgrad.algorithms.preference import dpo
from postgrad.data.encode.encoder import Encoder
from postgrad.data.encode.styles import STYLES
from postgrad.data.rows.files import read_rows
from postgrad.errors import Damaged, Missing
from postgrad.problem import Problem, Score
from postgrad.toolkit.sequences import encode_text, get_response_log_probs
from postgrad.verifiers.grading.answers import last_number
from postgrad.verifiers.grading.choice import choice

LETTERS = "ABCD"


def alpaca(prompt: str, response: str) -> str:
    """Return a prompt and its response in the Alpaca format.

    Nothing follows the response: the model would learn a newline there before the end token.
    """
    style = STYLES["alpaca_sft"]
    return f"{style.before}{prompt}{style.after}{response}"


def _document(encoder: Encoder, prompt: str, response: str) -> list[int]:
    """Return the ids of the Alpaca text: the tokenizer's BOS, the text, the end token."""
    end = encoder.tokenizer.eos_token_id
    if not isinstance(end, int):
        raise Missing("the tokenizer has no eos_token; set tokenizer.eos_token", at="eos_token")
    return [*encode_text(encoder, alpaca(prompt, response)), end]


class PackedSftDataset(Dataset[dict[str, Tensor]]):
    """Documents of a JSONL file, concatenated and split into rows of `seq_length` tokens.

    Each line of the file (.jsonl or .jsonl.gz) has `prompt` and `response`. Row i has
    `input_ids` (seq_length,) int64, the tokens from i · seq_length, and `labels`, the tokens
    one position later. The remainder is dropped: there are (tokens - 1) // seq_length rows.
    `shuffle` draws the order of the documents from torch's global generator.

    Raises:
        ConfigError: the file cannot be read, or a line has no prompt or no response.
        ValueError: seq_length is below 1.
    """

    def __init__(
        self, tokenizer: Any, dataset_path: str | os.PathLike[str], seq_length: int, shuffle: bool
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length is {seq_length}; give at least 1")
        self.seq_length = seq_length
        encoder = Encoder(tokenizer, "plain")
        documents: list[Tensor] = []
        for location, row in read_rows(Path(dataset_path)):
            prompt = row.get("prompt")
            response = row.get("response")
            if not isinstance(prompt, str) or not isinstance(response, str):
                raise Damaged(
                    f"{dataset_path}: {location}: prompt or response is not a string; "
                    "each line needs both"
                )
            documents.append(torch.tensor(_document(encoder, prompt, response)))
        if shuffle:
            documents = [documents[i] for i in torch.randperm(len(documents)).tolist()]
        empty = torch.empty(0, dtype=torch.int64)  # torch.cat refuses an empty list
        self.tokens = torch.cat([empty, *documents])

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
    """Return a PackedSftDataset; this is the assignment's name for it."""
    return PackedSftDataset(tokenizer, dataset_path, seq_length, shuffle)


def iterate_batches(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """Return a loader for one epoch of ceil(rows / batch_size) batches.

    Each row comes once; the last batch may be smaller. `len()` gives the number of batches.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def parse_mmlu_response(mmlu_example: dict[str, Any], model_output: str) -> str | None:
    """Return the letter A to D that the output gives as its answer, or None.

    Only a letter counts, never the text of an option. The verifier `choice` decides: the
    result is the letter for which it gives the output a positive score.
    """
    for letter in LETTERS:
        score = choice(model_output, Problem("mmlu", (), letter))
        if isinstance(score, Score) and score.value > 0:
            return letter
    return None


def parse_gsm8k_response(model_output: str) -> str | None:
    """Return the last number of the output as a string, or None when it has no digits.

    Currency signs, thousands separators and percent signs are removed: "$1,234.50." gives
    "1234.50". "3/4" stays a fraction. Compare the result as a number: it may be "72.0".
    """
    number = last_number(model_output)
    if number is None:
        return None
    for sign in ("\\", "$", ",", "%"):
        number = number.replace(sign, "")
    return number.replace("−", "-")


def compute_per_instance_dpo_loss(
    lm: nn.Module,
    lm_ref: nn.Module,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """Return the DPO loss of one pair, -log σ(β · ((lp_w - lp_l) - (ref_w - ref_l))).

    The result is a scalar on lm's device. lp is the log-prob of the complete Alpaca text with
    its end token; the prompt's part cancels. The reference may be on another device and runs
    without gradient.
    """
    encoder = Encoder(tokenizer, "plain")
    chosen_ids = _document(encoder, prompt, response_chosen)
    rejected_ids = _document(encoder, prompt, response_rejected)
    chosen = _log_prob(lm, chosen_ids)
    rejected = _log_prob(lm, rejected_ids)
    with torch.no_grad():
        reference_chosen = _log_prob(lm_ref, chosen_ids).to(chosen.device)
        reference_rejected = _log_prob(lm_ref, rejected_ids).to(chosen.device)
    return dpo(chosen, rejected, reference_chosen, reference_rejected, beta=beta).values[0]


def _log_prob(model: nn.Module, ids: list[int]) -> Tensor:
    """Return (1,) the log-prob of a token sequence given its first token."""
    row = torch.tensor([ids], device=next(model.parameters()).device)
    return get_response_log_probs(model, row[:, :-1], row[:, 1:])["log_probs"].sum(1)
