"""Formats problems for people to read (`postgrad data show`)."""

import json
import re
from collections.abc import Sequence
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from postgrad.pictures import text_of_content
from postgrad.problem import Problem

if TYPE_CHECKING:
    from postgrad.data.encode.encoder import Encoder

MAX_CHARACTERS = 1500  # of one text
REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{4,}")  # the tokens of a picture


def describe_problem(
    problem: Problem, location: str, encoder: "Encoder | None" = None
) -> list[str]:
    """Lines that show one problem: its messages, ground truth, demonstrations and columns.

    With `encoder` the lines show the prompt as the model sees it instead of the messages.
    """
    source = problem.data_source or "no data_source"
    lines = [f"── {location} · uid {problem.uid} · {source} ──"]
    text = problem.conversation.text if problem.conversation else ""
    if text:
        lines += ["text (sft trains on all of it):", *_indented(text)]
    elif encoder is None:
        for message in problem.messages:
            lines.append(f"{message['role']}:")
            if message["content"] is not None:
                lines += _indented(text_of_content(message["content"]))
            for call in message.get("tool_calls", ()):
                lines += _indented(f"tool call: {_as_text(call)}")
    else:
        lines.append(f"prompt, {len(encoder.prompt(problem))} tokens:")
        lines += _indented(shorten_pictures(encoder.text(problem)))
    for number, picture in enumerate(problem.images, 1):
        width, height = picture.size
        size = f"{width} x {height} pixels, {picture.kind}, {picture.num_bytes / 1024:.1f} KiB"
        if encoder:
            size += f", {encoder.count_picture_tokens(picture)} tokens"
        lines.append(f"picture {number}: {size}, {picture.place or 'in the data file'}")
    if not text:
        truth = _shorten(problem.ground_truth) if problem.ground_truth else "none"
        lines.append(f"ground truth: {truth}")
    for number, demonstration in enumerate(problem.demonstrations, 1):
        size = f"{len(demonstration)} characters"
        if encoder:
            size += f", {len(encoder.reply(problem, demonstration))} tokens"
        lines += [f"demonstration {number} ({size}):", *_indented(demonstration)]
    for name, value in problem.extra.items():
        if name == "extra_info" and isinstance(value, dict):
            value = {key: item for key, item in value.items() if key != "question"}
        if value not in (None, "", {}, []):
            lines.append(f"{name}: {_shorten(_as_text(value))}")
    return lines


def describe_pictures(problems: Sequence[Problem], encoder: "Encoder | None" = None) -> list[str]:
    """Line about all pictures: how many, their sizes, and how many tokens they are to a model."""
    pictures = {picture.key: picture for problem in problems for picture in problem.images}
    if not pictures:
        return []
    shown = sum(bool(problem.images) for problem in problems)
    sizes = sorted((picture.size for picture in pictures.values()), key=prod)
    ends = " to ".join(f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    total = sum(picture.num_bytes for picture in pictures.values()) / (1 << 20)
    line = f"pictures: {len(pictures)} in {shown} problems, {ends} pixels, {total:.1f} MiB"
    if encoder:
        counts = [encoder.count_picture_tokens(picture) for picture in pictures.values()]
        line += f"; tokens each: {min(counts)} to {max(counts)}, median {median(counts):g}"
    return [line]


def describe_provenance(provenance: dict[str, Any]) -> list[str]:
    """Lines about the origin of a prepared file; empty for other files."""
    if not provenance:
        return []
    origin = ""
    if provenance["commit"]:
        origin = f" from {provenance['repo']} at {provenance['commit'][:10]}"
    lines = [
        f"prepared: {provenance['set']} {provenance['split']}{origin}, "
        f"style {provenance['style']}, {provenance['kept']} of {provenance['read']} rows"
    ]
    lines += [f"  dropped {count}: {reason}" for reason, count in provenance["dropped"].items()]
    return lines


def shorten_pictures(text: str) -> str:
    """Return a rendered prompt with the number of a picture's tokens in place of the tokens."""
    return REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in _shorten(text).split("\n")]


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
