"""Data sources that are generated: `seeds:N[:start=M]`, `reasoning_gym:NAME[:OPTION=VALUE]...`."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from postgrad.errors import WrongValue
from postgrad.gym import make_dataset
from postgrad.problem import Problem

SEEDS = re.compile(r"seeds:(?P<count>\d{1,9})(:start=(?P<start>\d{1,9}))?")
MAX_SEEDS = 10_000_000
ANSWER_FORMAT = "Give your final answer between <answer> and </answer>."


def seeds_source(source: str) -> list[Problem]:
    """N problems without text, for environments whose reset() returns the whole prompt.

    `seeds:N:start=M` begins with number M, so that held-out problems differ from those of training.

    Raises:
        ConfigError: the source is neither `seeds:N` nor `seeds:N:start=M`.
    """
    found = SEEDS.fullmatch(source)
    count = int(found["count"]) if found else 0
    if found is None or not 0 < count <= MAX_SEEDS:
        raise WrongValue(
            f"data source {source!r} is not seeds:N or seeds:N:start=M; "
            "type for example seeds:1000, and seeds:100:start=1000 for held-out problems"
        )
    start = int(found["start"] or 0)
    message = {"role": "user", "content": ""}
    return [Problem(f"seed-{i}", (message,), "", "seeds") for i in range(start, start + count)]


def reasoning_gym_source(source: str) -> Iterator[Problem]:
    """Problems of a generator of reasoning-gym; its own scorer is their verifier.

    The list is the same for the same options. `seed` and `size` are options of every generator,
    `level` of those with a curriculum.

    Raises:
        ConfigError: the source is malformed, or the generator or an option does not exist.
    """
    name, settings = _parse(source)
    dataset = make_dataset(name, settings)
    for index in range(len(dataset)):
        entry = dataset[index]
        question = f"{entry['question'].rstrip()}\n\n{ANSWER_FORMAT}"
        messages = ({"role": "user", "content": question},)
        extra = {"reasoning_gym": {"name": name, "settings": settings, "index": index}}
        truth = "" if entry["answer"] is None else str(entry["answer"])
        yield Problem("", messages, truth, f"reasoning_gym/{name}", extra=extra)


def _parse(source: str) -> tuple[str, dict[str, Any]]:
    _, name, *options = source.split(":")
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise WrongValue(
                f"data source {source!r} is not reasoning_gym:NAME:OPTION=VALUE; "
                "type for example reasoning_gym:countdown:size=500:seed=1"
            )
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return name, settings
