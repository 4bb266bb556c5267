"""Samples responses of a model during training and logs their rewards, entropies and lengths."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.masked import masked_normalize
from postgrad.data.encode.encoder import Encoder
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import stop_ids
from postgrad.toolkit.sequences import compute_entropy, encode_text, pad_id

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
MAX_NEW_TOKENS = 1024
REWARDS = ("reward", "format_reward", "answer_reward")


def log_generations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    truths: Sequence[str],
    reward_fn: Callable[[str, str], dict[str, float]],
    generation_kwargs: dict[str, Any] | None = None,
    max_prompts: int | None = None,
) -> dict[str, Any]:
    """Generate one response for each of the first `max_prompts` prompts and score them.

    All prompts form one batch of a transformers model. `generation_kwargs` go to
    `model.generate`. The default samples at temperature 1 without top-p or top-k,
    at most 1,024 new tokens. The model is in evaluation mode during the call;
    its previous mode is restored afterwards.

    Returns:
        `examples`, one dict per prompt with prompt, response, ground_truth, reward,
        format_reward, answer_reward, avg_token_entropy (nats) and response_length
        (tokens, the end token included), and their means: avg_token_entropy, avg_reward,
        avg_format_reward, avg_answer_reward, avg_response_length/total, /correct and
        /incorrect. A response is correct when answer_reward > 0. The mean of no
        responses is 0.0.

    Raises: ValueError when there are no prompts, or not one ground truth per prompt.
    """
    if len(prompts) != len(truths):
        raise ValueError(
            f"{len(prompts)} prompts for {len(truths)} ground truths; give one truth per prompt"
        )
    prompts = list(prompts)[:max_prompts]
    truths = list(truths)[:max_prompts]
    if not prompts:
        raise ValueError("no prompts; give at least one")
    was_training = model.training
    model.eval()
    try:
        completions, mask, entropies = _generate(model, tokenizer, prompts, generation_kwargs or {})
    finally:
        model.train(was_training)
    lengths = mask.sum(1)
    mean_entropies = masked_normalize(entropies, mask, dim=1) / lengths.clamp(min=1)
    decode = Encoder(tokenizer, "plain").decode
    examples: list[dict[str, Any]] = []
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        response = decode(completions[row][mask[row]].tolist())
        score = reward_fn(response, truth)
        example: dict[str, Any] = {"prompt": prompt, "response": response, "ground_truth": truth}
        for name in REWARDS:
            example[name] = float(score.get(name, 0.0))
        example["avg_token_entropy"] = float(mean_entropies[row])
        example["response_length"] = int(lengths[row])
        examples.append(example)
    return {"examples": examples, **_means(examples)}


def _means(examples: list[dict[str, Any]]) -> dict[str, float]:
    correct = [example for example in examples if example["answer_reward"] > 0]
    incorrect = [example for example in examples if not example["answer_reward"] > 0]
    return {
        "avg_token_entropy": _mean("avg_token_entropy", examples),
        **{f"avg_{name}": _mean(name, examples) for name in REWARDS},
        "avg_response_length/total": _mean("response_length", examples),
        "avg_response_length/correct": _mean("response_length", correct),
        "avg_response_length/incorrect": _mean("response_length", incorrect),
    }


def _mean(name: str, examples: list[dict[str, Any]]) -> float:
    if not examples:
        return 0.0
    return sum(example[name] for example in examples) / len(examples)


@torch.no_grad()
def _generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], generation_kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return completions, response mask and token entropies, each (rows, new tokens) on the CPU.

    The entropies are those of the model's own distribution, without temperature or top-p.
    """
    device = next(model.parameters()).device
    encoder = Encoder(tokenizer, "plain")
    rows = [encode_text(encoder, prompt) for prompt in prompts]
    pad = pad_id(tokenizer)
    prompt_ids, prompt_mask = _pad_left(rows, pad)
    prompt_ids = prompt_ids.to(device)
    prompt_mask = prompt_mask.to(device)
    sampling = SAMPLING if generation_kwargs.get("do_sample", True) else {"do_sample": False}
    settings = {
        "max_new_tokens": MAX_NEW_TOKENS,
        "pad_token_id": pad,
        **sampling,
        **generation_kwargs,
    }
    sequences = model.generate(input_ids=prompt_ids, attention_mask=prompt_mask, **settings)
    completions = sequences[:, prompt_ids.shape[1] :]
    end_ids = torch.as_tensor(_end_ids(model, tokenizer, settings), device=device)
    mask = _response_mask(completions, end_ids, pad)
    attention_mask = torch.cat([prompt_mask, mask.to(prompt_mask)], dim=1)
    # Positions count real tokens only: padding on the left must not shift them.
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=sequences,
        attention_mask=attention_mask,
        position_ids=positions,
        logits_to_keep=completions.shape[1] + 1,
    ).logits
    return completions.cpu(), mask.cpu(), compute_entropy(logits[:, :-1]).cpu()


def _end_ids(model: Any, tokenizer: Any, settings: dict[str, Any]) -> int | list[int]:
    if "eos_token_id" in settings:
        return settings["eos_token_id"]
    return stop_ids(Loaded(model, tokenizer))


def _pad_left(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return (rows, longest row) token ids and their attention mask, int64."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = torch.tensor(row)
        mask[number, width - len(row) :] = 1
    return ids, mask


def _response_mask(completions: Tensor, end_ids: Tensor, pad: int) -> Tensor:
    """Return (rows, new tokens) bool: true up to and including the first end token.

    Without an end token, all tokens but the padding are true.
    """
    is_end = torch.isin(completions, end_ids)
    before_or_at = (is_end.cumsum(1) - is_end.long()) == 0
    return before_or_at & (is_end | (completions != pad))
