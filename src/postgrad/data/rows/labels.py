"""Labels that say whether a response is good: those of KTO and LLaMA-Factory's `kto_tag`."""

from typing import Any

from postgrad.problem import Problem

# The label of a response by the text of its value, in lower case.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
LABEL_COLUMNS = ("label", "kto_tag")  # the second is LLaMA-Factory's


def read_label(value: Any) -> bool | None:
    """Return true or false, also as 1 or 0 and as text; None if the value is neither."""
    return LABELS.get(str(value).lower())


def label_value(problem: Problem) -> Any:
    """Return what the data have as a row's label; None without one."""
    values = (problem.extra.get(name) for name in LABEL_COLUMNS)
    return next((value for value in values if value is not None), None)


def label_of(problem: Problem) -> bool | None:
    """Return a row's label as `read_label` reads it."""
    return read_label(label_value(problem))


def is_undesirable(problem: Problem) -> bool:
    """Whether a row's label is false; the number 0 may be a class."""
    return str(label_value(problem)).lower() == "false"
