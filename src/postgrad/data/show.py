"""Problems as a person reads them."""

import json
from typing import TYPE_CHECKING, Any

from postgrad.problem import Problem

if TYPE_CHECKING:
    from postgrad.data.render import Prompts

MAX_CHARACTERS = 1500  # of one text


def describe_problem(problem: Problem, place: str, prompts: "Prompts | None" = None) -> list[str]:
    """Lines that show one problem: its turns, or with `prompts` the text the model sees, then what it is judged by."""
    lines = [f"── {place} · uid {problem.uid} · {problem.data_source or 'no data_source'} ──"]
    if prompts is None:
        for message in problem.messages:
            lines += [f"{message['role']}:", *_indented(message["content"])]
    else:
        lines += [
            f"prompt, {len(prompts.encode(problem))} tokens:",
            *_indented(prompts.text(problem)),
        ]
    lines.append(
        f"ground truth: {_cut(problem.ground_truth) if problem.ground_truth else 'none, a judge decides'}"
    )
    for number, text in enumerate(problem.demonstrations, 1):
        tokens = f", {len(prompts.encode_response(text))} tokens" if prompts else ""
        lines += [f"demonstration {number} ({len(text)} characters{tokens}):", *_indented(text)]
    for name, value in problem.extra.items():
        if name == "extra_info":
            value = {key: item for key, item in value.items() if key != "question"}
        if value not in (None, "", {}, []):
            lines.append(
                f"{name}: {_cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))}"
            )
    return lines


def describe_provenance(provenance: dict[str, Any]) -> list[str]:
    """What a prepared file says of itself."""
    if not provenance:
        return []
    origin = (
        f" from {provenance['repo']} at {provenance['commit'][:10]}" if provenance["commit"] else ""
    )
    lines = [
        f"prepared: {provenance['set']} {provenance['split']}{origin}, style {provenance['style']}, "
        f"{provenance['kept']} of {provenance['read']} rows"
    ]
    lines += [f"  dropped {count}: {reason}" for reason, count in provenance["dropped"].items()]
    return lines


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in _cut(text).split("\n")]


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
