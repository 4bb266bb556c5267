"""Data sources that are generated: `seeds:N` and `reasoning_gym:NAME[:OPTION=VALUE]...`."""

import ast
from collections.abc import Iterator
from typing import Any

from postgrad.errors import ConfigError
from postgrad.gym import make_dataset
from postgrad.problem import Problem

ANSWER_FORMAT = "Give your final answer between <answer> and </answer>."


def seeds_source(source: str) -> list[Problem]:
    """N problems without text, for environments whose reset() returns the whole prompt.

    Raises:
        ConfigError: the source is not `seeds:N`.
    """
    count = source.partition(":")[2]
    if not count.isdecimal() or not 0 < int(count) <= 10_000_000:
        raise ConfigError(f"data source {source!r} is not seeds:N; type for example seeds:1000")
    message = {"role": "user", "content": ""}
    return [Problem(f"seed-{i}", (message,), "", "seeds") for i in range(int(count))]


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
            raise ConfigError(
                f"data source {source!r} is not reasoning_gym:NAME:OPTION=VALUE; "
                "type for example reasoning_gym:countdown:size=500:seed=1"
            )
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return name, settings
