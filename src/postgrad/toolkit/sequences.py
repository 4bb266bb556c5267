"""Tokenized prompts and outputs as padded tensors; log-probs and entropies from logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.algorithms import entropy as chunked
from postgrad.data.encode.encoder import Encoder
from postgrad.problem import Problem


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Encode each prompt and output separately, concatenate their ids, pad on the right.

    The prompt gets the tokenizer's special tokens (for Llama, the BOS), the output none.
    No end token is appended.

    Returns:
        With L the longest prompt + output, each (rows, L - 1):
        `input_ids` int64, all but the last column;
        `labels` int64, all but the first column, padding ids included;
        `response_mask` bool, true where the label is an output token.
        An empty output gives a row without response tokens.

    Raises:
        ValueError: the lists differ in length or are empty.
        ConfigError: a prompt has no tokens.
    """
    if len(prompt_strs) != len(output_strs):
        raise ValueError(
            f"{len(prompt_strs)} prompts for {len(output_strs)} outputs; give one output per prompt"
        )
    if not prompt_strs:
        raise ValueError("no prompts; give at least one")
    encoder = Encoder(tokenizer, "plain")
    pairs: list[tuple[list[int], list[int]]] = []
    for prompt_str, output_str in zip(prompt_strs, output_strs, strict=True):
        prompt = encode_text(encoder, prompt_str)
        pairs.append((prompt, encoder.encode_response(output_str, with_end=False)))
    width = max(len(prompt) + len(output) for prompt, output in pairs)
    ids = torch.full((len(pairs), width), pad_id(tokenizer), dtype=torch.int64)
    is_output = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (prompt, output) in enumerate(pairs):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor([*prompt, *output])
        is_output[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": is_output[:, 1:]}


def encode_text(encoder: Encoder, text: str) -> list[int]:
    """Return the ids of a text encoded as training encodes a plain prompt.

    The special tokens are included, with one BOS; no end token is appended.
    """
    return encoder.prompt(Problem("text", ({"role": "user", "content": text},), ""))


def pad_id(tokenizer: Any) -> int:
    """Return the tokenizer's pad id, or its end-of-sequence id when it has no pad token.

    Raises: ValueError when it has neither; another id, such as 0, could be a real token.
    """
    token_id = tokenizer.pad_token_id
    if token_id is None:
        token_id = tokenizer.eos_token_id
    if token_id is None:
        raise ValueError("the tokenizer has no pad_token and no eos_token; set tokenizer.pad_token")
    return int(token_id)


def compute_entropy(logits: Tensor) -> Tensor:
    """Return (...,) entropies in nats of `logits` (..., vocabulary).

    The arithmetic is at least float32, whatever the dtype of the logits.
    """
    return chunked.entropy(logits)


def selective_log_softmax(logits: Tensor, index: Tensor, chunk: int = chunked.CHUNK) -> Tensor:
    """Return (rows, positions): log-softmax of `logits` at the token ids `index`.

    `logits` is (rows, positions, vocabulary). `chunk` positions are computed at a time, so no
    second tensor of the size of the logits is kept. The result does not depend on `chunk`.
    """
    return chunked.selective_log_softmax(logits, index, chunk=chunk)


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """Run one forward pass and return the `log_probs` of the labels, (rows, positions) float32.

    They are differentiable, and no position is masked. `return_token_entropy` adds
    `token_entropy` (rows, positions), for logging: it has no gradient and keeps no activations.
    A causal model needs no attention mask for padding on the right.
    """
    logits = model(input_ids).logits
    result = {"log_probs": selective_log_softmax(logits, labels)}
    if return_token_entropy:
        with torch.no_grad():
            result["token_entropy"] = compute_entropy(logits)
    return result
