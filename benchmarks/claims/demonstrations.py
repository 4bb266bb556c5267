"""Probability of each token of the demonstrations under a model.

    python benchmarks/research.py demonstrations MODEL... --data FOLDER/train.jsonl --rows 16

LUFFY's loss of a demonstration's token is -A p / (p + 0.1). Its derivative by log p is
A 0.1 p / (p + 0.1)^2, about 10 A p for a token with a probability p near 0: such a token is not
learned, whereas log p has the derivative 1 for every token. This command shows which tokens these
are. MODEL may be a checkpoint of a run (RUN/checkpoints/step-N/policy).
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GAMMA = 0.1  # of p / (p + gamma)
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.5)
LIMITS = (1e-4, 1e-3, 1e-2)


class TokenProb(NamedTuple):
    """A token's probability; `place` is the same for all demonstrations of one written form."""

    place: tuple[int, int]
    text: str
    prob: float


def token_probs(loaded: Any, prompts: Any, problem: Any) -> list[TokenProb]:
    """Return the probability of each token of the problem's first demonstration, end included."""
    import torch

    prompt = prompts.prompt(problem)
    response = prompts.demonstrations(problem)[0]
    device = next(loaded.model.parameters()).device
    ids = torch.tensor([prompt + response], device=device)
    with torch.no_grad():
        logits = loaded.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    texts = [prompts.decode_raw([token]) for token in response]
    return list(map(TokenProb, places(texts), texts, chosen.exp().tolist()))


def places(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return, per token, the number of words before it and of digits since the last word."""
    found: list[tuple[int, int]] = []
    num_words = num_digits = 0
    for text in texts:
        found.append((num_words, num_digits))
        if text.strip().isdigit():
            num_digits += 1
        else:
            num_words += 1
            num_digits = 0
    return found


def measure(path: str, data: str, num_rows: int) -> list[list[TokenProb]]:
    """Return the token probabilities of the first problems' demonstrations, a list per problem."""
    from postgrad.config.schema import ModelConfig
    from postgrad.data.encode.encoder import Encoder
    from postgrad.data.problems import load_problems
    from postgrad.model.device import choose_device
    from postgrad.model.load.load import load

    loaded = load(ModelConfig(path=path, dtype="float32"), choose_device("auto"))
    prompts = Encoder(loaded.tokenizer)
    problems = load_problems(data)[:num_rows]
    if not all(problem.demonstrations for problem in problems):
        raise SystemExit(f"{data}: problems without a demonstration (column target)")
    return [token_probs(loaded, prompts, problem) for problem in problems]


def shaped(prob: float) -> float:
    return prob / (prob + GAMMA)


def shaped_grad(prob: float) -> float:
    """Return the derivative of p / (p + gamma) by log p; that of log p is 1."""
    return GAMMA * prob / (prob + GAMMA) ** 2


def summary(rows: Sequence[Sequence[TokenProb]]) -> dict[str, float]:
    """Return quantiles of the probabilities, shares below limits and the mean shaped ratio."""
    probs = sorted(token.prob for row in rows for token in row)
    last = len(probs) - 1
    found: dict[str, float] = {"tokens": len(probs)}
    found |= {f"quantile {q:g}": probs[round(q * last)] for q in QUANTILES}
    found |= {f"below {x:g}": sum(p < x for p in probs) / len(probs) for x in LIMITS}
    found["mean p/(p+0.1)"] = statistics.mean(map(shaped, probs))
    found["mean log p"] = statistics.mean(
        math.log(max(token.prob, 1e-30)) for row in rows for token in row
    )
    return found


def lowest(rows: Sequence[Sequence[TokenProb]], count: int) -> list[TokenProb]:
    """Return the places with the lowest median probability, in the order of the text.

    The text is that of the first problem. Places that it does not have are left out.
    """
    by_place: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        for token in row:
            by_place.setdefault(token.place, []).append(token.prob)
    medians = [token._replace(prob=statistics.median(by_place[token.place])) for token in rows[0]]
    limit = sorted(token.prob for token in medians)[min(count, len(medians)) - 1]
    return [token for token in medians if token.prob <= limit]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="model folders, or names such as smollm2")
    parser.add_argument("--data", required=True, help="problems with demonstrations")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lowest", type=int, default=8, help="tokens to show")
    parser.add_argument("--out", type=Path, help="JSONL file for the figures")
    options = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    for path in options.models:
        rows = measure(path, options.data, options.rows)
        lines.append({"model": path, "rows": len(rows), **summary(rows)})
        for key, value in lines[-1].items():
            print(f"{key}: {value if isinstance(value, (str, int)) else f'{value:.3g}'}")
        for token in lowest(rows, options.lowest):
            print(f"{token.text!r}: median {token.prob:.3g}")
        lines[-1]["lowest"] = [token._asdict() for token in lowest(rows, options.lowest)]
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0
