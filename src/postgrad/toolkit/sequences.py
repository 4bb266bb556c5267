"""Texts as padded tensors, and what a model's logits say about them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.algorithms import entropy as by_slice
from postgrad.data.render import Prompts
from postgrad.problem import Problem


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Prompts and outputs, encoded apart and joined as ids, padded on the right.

    The prompt gets the tokenizer's special tokens (a Llama its BOS), the output none; no end is appended.

    Returns:
        With L the longest prompt + output, each (rows, L - 1):
        `input_ids` int64, all but the last column; `labels` int64, all but the first, padding ids included;
        `response_mask` bool, true where the label is an output token. An empty output is a row without any.

    Raises: ValueError when the lists differ in length or are empty; ConfigError for a prompt without tokens.
    """
    if len(prompt_strs) != len(output_strs):
        raise ValueError(
            f"{len(prompt_strs)} prompts for {len(output_strs)} outputs; give one output for each prompt"
        )
    if not prompt_strs:
        raise ValueError("no prompts; there is nothing to tokenize")
    prompts = Prompts(tokenizer, "plain")
    pairs = [
        (encode_text(prompts, p), prompts.encode_response(o, with_end=False))
        for p, o in zip(prompt_strs, output_strs, strict=True)
    ]
    width = max(len(prompt) + len(output) for prompt, output in pairs)
    ids = torch.full((len(pairs), width), pad_id(tokenizer), dtype=torch.int64)
    is_output = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (prompt, output) in enumerate(pairs):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor([*prompt, *output])
        is_output[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": is_output[:, 1:]}


def encode_text(prompts: Prompts, text: str) -> list[int]:
    """A text as training encodes a plain prompt: special tokens on, a BOS once, no end."""
    return prompts.encode(Problem("text", ({"role": "user", "content": text},), ""))


def pad_id(tokenizer: Any) -> int:
    """The padding id, or the end's where there is none (never a real token such as 0)."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise ValueError(
            "the tokenizer has neither a pad nor an end token; set tokenizer.pad_token"
        )
    return int(found)


def compute_entropy(logits: Tensor) -> Tensor:
    """(...,) entropy in nats of the distributions of `logits` (..., vocabulary). Float32 inside, whatever the logits are."""
    return by_slice.entropy(logits)


def selective_log_softmax(logits: Tensor, index: Tensor, chunk: int = by_slice.CHUNK) -> Tensor:
    """(rows, positions) log-softmax of `logits` (rows, positions, vocabulary) at the ids `index`, `chunk` positions at a time.

    No second tensor of the logits' size is ever kept. The result does not depend on `chunk`.
    """
    return by_slice.selective_log_softmax(logits, index, chunk=chunk)


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """One forward pass. `log_probs` (rows, positions) of the labels, float32, differentiable, nothing masked.

    With `return_token_entropy` also `token_entropy` (rows, positions), for logging: it carries no gradient and keeps no
    activations. Padding on the right needs no attention mask in a causal model.
    """
    logits = model(input_ids).logits
    out = {"log_probs": selective_log_softmax(logits, labels)}
    if return_token_entropy:
        with torch.no_grad():
            out["token_entropy"] = compute_entropy(logits)
    return out
