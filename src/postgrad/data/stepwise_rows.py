"""Reads Math-Shepherd's own columns as rows of stepwise supervision, as TRL writes them.

`input` is the problem and the steps of a solution, with the tag `ки` after each step; `label` is
the same text with `+` (right) or `-` (wrong) in place of each tag.
"""

from postgrad.data.rows import (
    Row,
    RowError,
    data_source_of,
    text_of,
    uid_of,
    unused_columns,
    user_turn,
)
from postgrad.problem import Problem

STEP_TAG = "ки"
FIRST_STEP = "Step 1:"
LABELS = {"+": True, "-": False}
ADVICE = "remove the row, or drop all such rows with postgrad data prepare own"


def is_tagged(row: Row) -> bool:
    """Whether a row has Math-Shepherd's tags."""
    given = row.get("input")
    return isinstance(given, str) and STEP_TAG in given and isinstance(row.get("label"), str)


def read_tagged_steps(row: Row, stem: str) -> Problem:
    """The prompt, and in `extra` the steps as `completions` and whether each is right as `labels`.

    Raises:
        RowError: the texts differ elsewhere than at the tags, or the first step is not found.
    """
    *texts, rest = text_of(row, "input").split(STEP_TAG)
    labels = _labels_of([*texts, rest], text_of(row, "label"))
    prompt, mark, first = texts[0].rpartition(FIRST_STEP) if texts else ("", "", "")
    if not mark or not prompt.strip():
        raise RowError(f"input must be a problem, {FIRST_STEP!r} and the other steps; {ADVICE}")
    steps = [step.strip() for step in (mark + first, *texts[1:])]
    if not all(steps):
        raise RowError(f"input has an empty step before a tag {STEP_TAG}; {ADVICE}")
    if rest.strip():
        raise RowError(f"input goes on after the last tag {STEP_TAG}; {ADVICE}")
    return Problem(
        uid=uid_of(row),
        messages=user_turn(prompt.strip()),
        ground_truth="",
        data_source=data_source_of(row, stem),
        extra=unused_columns(row, "input", "label") | {"completions": steps, "labels": labels},
    )


def _labels_of(texts: list[str], labeled: str) -> list[bool]:
    """The label between each two of the texts, which `labeled` holds with labels between them."""
    labels: list[bool] = []
    for text in texts[:-1]:
        sign = labeled.removeprefix(text)[:1]
        if not labeled.startswith(text) or sign not in LABELS:
            break
        labels.append(LABELS[sign])
        labeled = labeled[len(text) + 1 :]
    if len(labels) < len(texts) - 1 or labeled.strip() != texts[-1].strip():
        raise RowError(
            f"label must be the text of input with + or - for each tag {STEP_TAG}; {ADVICE}"
        )
    return labels
