"""How well a model finishes right solutions of which it is shown the first part.

    python benchmarks/research.py continuations MODEL... --data GSM8K/test.jsonl --shown 0.6,0.95

A classmate that cannot do this has nothing to tell a policy: its reward is the same for good and
for bad thoughts. The solutions are the demonstrations of the problems; the model continues the
words that it is shown as a classmate does, one response at temperature 1.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from claims.problems import INSTRUCTION

MAX_TOKENS = 128  # as in the claim's runs
CALCULATIONS = re.compile(r"<<.*?>>")  # GSM8K's marks for a calculator


def first_words(text: str, share: float) -> str:
    """Return the first words of a text, with the spaces between them."""
    words = re.findall(r"\S+\s*", CALCULATIONS.sub("", text))
    return "".join(words[: int(len(words) * share)]).rstrip()


def read_problems(data: str, num_rows: int) -> list[Any]:
    from postgrad.data.problems import load_problems

    problems: list[Any] = []
    for problem in load_problems(data)[:num_rows]:
        if not problem.demonstrations:
            raise SystemExit(f"{data}: problems without a demonstration (column answer or target)")
        *before, last = problem.messages
        question = {**last, "content": last["content"] + INSTRUCTION}
        problems.append(dataclasses.replace(problem, messages=(*before, question)))
    return problems


def measure(path: str, problems: Sequence[Any], shares: Sequence[float]) -> Iterator[float]:
    """Yield the share of right continuations for each share of words that is shown."""
    from postgrad.api.sampler import Sampler
    from postgrad.rollout.classmates import Classmates
    from postgrad.rollout.engine import make_sampling
    from postgrad.rollout.generator import Generator
    from postgrad.verifiers.scorer import Scorer

    sampler = Sampler(path)
    sampling = make_sampling(sampler.config.rollout, 1.0)
    sampling = dataclasses.replace(sampling, max_new_tokens=MAX_TOKENS)
    generator = Generator(sampler.engine, sampler.encoder)
    classmates = Classmates("classmate", [generator], [""], [""], sampling, num_samples=1, seed=0)
    with Scorer("auto") as scorer:
        for share in shares:
            shown = [first_words(problem.demonstrations[0], share) for problem in problems]
            names = [problem.uid for problem in problems]
            texts, _ = classmates.generate(problems, shown, problems, names, step=0)
            scores, _ = classmates.score(scorer, problems, texts)
            yield float(scores.nanmean())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="model folders, or names such as smollm2")
    parser.add_argument("--data", required=True, help="problems with solutions")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--shown", default="0.3,0.6,0.95", help="shares of the words")
    options = parser.parse_args(arguments)
    problems = read_problems(options.data, options.rows)
    shares = [float(word) for word in options.shown.split(",")]
    for path in options.models:
        for share, right in zip(shares, measure(path, problems, shares), strict=True):
            print(f"{path}: {share:.0%} of the words shown, {right:.1%} right", flush=True)
    return 0
