"""What a model answers to some prompts, with rewards, entropies and lengths: for looking at while training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.masked import masked_normalize
from postgrad.data.render import Prompts
from postgrad.model.load import Loaded, stop_ids
from postgrad.toolkit.sequences import compute_entropy, encode_text, pad_id

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
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
    """Let a transformers model answer the first `max_prompts` prompts, in one batch, and judge the answers.

    `generation_kwargs` go to model.generate; by default it samples at temperature 1 from the whole distribution, 1,024 new
    tokens at the most. The model is in evaluation mode meanwhile, and in its own mode again afterwards.

    Returns:
        `examples`: a dict each with prompt, response, ground_truth, reward, format_reward, answer_reward, avg_token_entropy (nats)
        and response_length (tokens, the end included); and the means over them: avg_token_entropy, avg_reward,
        avg_format_reward, avg_answer_reward, avg_response_length/total, /correct and /incorrect (0.0 when there is none such;
        correct is answer_reward > 0).
    """
    if len(prompts) != len(truths):
        raise ValueError(f"{len(prompts)} prompts for {len(truths)} ground truths")
    prompts, truths = list(prompts)[:max_prompts], list(truths)[:max_prompts]
    if not prompts:
        raise ValueError("no prompts; there is nothing to generate")
    was_training = model.training
    model.eval()
    try:
        completions, mask, entropies = _generate(model, tokenizer, prompts, generation_kwargs or {})
    finally:
        model.train(was_training)
    lengths = mask.sum(1)
    means = masked_normalize(entropies, mask, dim=1) / lengths.clamp(min=1)
    decode = Prompts(tokenizer, "plain").decode
    examples: list[dict[str, Any]] = []
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        response = decode(completions[row][mask[row]].tolist())
        score = reward_fn(response, truth)
        examples.append(
            {"prompt": prompt, "response": response, "ground_truth": truth}
            | {name: float(score.get(name, 0.0)) for name in REWARDS}
            | {"avg_token_entropy": float(means[row]), "response_length": int(lengths[row])}
        )
    return {"examples": examples, **_means(examples)}


def _means(examples: list[dict[str, Any]]) -> dict[str, float]:
    def mean(name: str, of: list[dict[str, Any]]) -> float:
        return sum(example[name] for example in of) / len(of) if of else 0.0

    correct = [example for example in examples if example["answer_reward"] > 0]
    incorrect = [example for example in examples if not example["answer_reward"] > 0]
    return {
        "avg_token_entropy": mean("avg_token_entropy", examples),
        **{f"avg_{name}": mean(name, examples) for name in REWARDS},
        "avg_response_length/total": mean("response_length", examples),
        "avg_response_length/correct": mean("response_length", correct),
        "avg_response_length/incorrect": mean("response_length", incorrect),
    }


@torch.no_grad()
def _generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], wishes: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, new) completions, the mask of what belongs to each response, and the entropies their tokens were drawn from."""
    device = next(model.parameters()).device
    encoder = Prompts(tokenizer, "plain")
    rows = [encode_text(encoder, prompt) for prompt in prompts]
    pad, width = pad_id(tokenizer), max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    prompt_mask = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device
    )
    sampling = SAMPLING if wishes.get("do_sample", True) else {"do_sample": False}
    settings = {"max_new_tokens": 1024, "pad_token_id": pad, **sampling, **wishes}
    sequences = model.generate(input_ids=ids, attention_mask=prompt_mask, **settings)
    completions = sequences[:, width:]
    ends = (
        settings["eos_token_id"]
        if "eos_token_id" in settings
        else stop_ids(Loaded(model, tokenizer))
    )
    mask = _up_to_the_end(completions, torch.as_tensor(ends, device=device), pad)
    seen = torch.cat([prompt_mask, mask.to(prompt_mask)], dim=1)
    positions = (seen.cumsum(1) - 1).clamp(
        min=0
    )  # padding on the left must not shift the positions
    new = completions.shape[1]
    logits = model(
        input_ids=sequences, attention_mask=seen, position_ids=positions, logits_to_keep=new + 1
    ).logits
    return completions.cpu(), mask.cpu(), compute_entropy(logits[:, :-1]).cpu()


def _up_to_the_end(completions: Tensor, ends: Tensor, pad: int) -> Tensor:
    """(rows, new) bool: everything up to and including the first end; all of it without one, less the padding."""
    is_end = torch.isin(completions, ends)
    before_or_at = (is_end.cumsum(1) - is_end.long()) == 0
    return before_or_at & (is_end | (completions != pad))
