"""What to do with the columns of a row that fits no schema, for the error message."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from postgrad.data.csv_rows import NESTED_COLUMNS
from postgrad.data.ranked_replies import are_replies
from postgrad.data.rows import Row

MAX_SCHEMAS = 4  # that a hint lists
PROMPTS = ("question", "problem", "query", "input", "instruction")
# What to type for the columns of some known data sets.
KNOWN_SETS = {
    ("opa", "opb", "opc", "opd", "cop"): (  # MedMCQA
        "type FILE:opa=option_a:opb=option_b:opc=option_c:opd=option_d:cop=answer"
    ),
    ("Question", "Correct Answer"): "use postgrad data prepare gpqa from=FILE",
    ("question", "r1_solution_1", "final_answer"): "use postgrad data prepare deepmath from=FILE",
    ("question", "long_answer", "final_decision"): "type FILE:final_decision=answer",  # PubMedQA
    ("question", "deepseek_attempt"): (  # s1K-1.1
        "type FILE:question=prompt:deepseek_attempt=response, without the thinking; or write it "
        "into the response, as <think>...</think>"
    ),
    ("responses_create_params", "expected_answer"): (  # NeMo Gym
        "type FILE:responses_create_params.input=prompt:expected_answer=ground_truth"
    ),
    ("context", "question", "answers"): "type FILE:answers.text.0=answer",  # SQuAD
}
RENAMES = (
    "rename to prompt and ground_truth, question and answer, prompt and completion, messages, "
    "or prompt, chosen and rejected (FILE:OLD=NEW); see docs/data.md, data prepare"
)


def rename_hint(
    row: Row, schemas: Sequence[tuple[str, tuple[str, ...]]], fits: Callable[[Row], bool]
) -> str:
    """What to rename: a misspelled column, or the columns of the schemas that share most of them.

    Args:
        row: the row.
        schemas: (name, columns) of each known schema.
        fits: whether a row fits one of them.
    """
    known = sorted({column for _, columns in schemas for column in columns})
    if fits({str(column).lower(): value for column, value in row.items()}):
        capital = [name for name in map(str, row) if name.lower() in known and name not in known]
        renames = "".join(f":{name}={name.lower()}" for name in capital)
        return f"write the names of the columns in lower case (FILE{renames})"
    for column in map(str, row):
        similar = difflib.get_close_matches(column, known, n=1, cutoff=0.8)
        if similar and similar[0] not in row and _is_fixed(row, column, similar[0], fits):
            shown = column if column == column.strip() else repr(column)
            return f"did you mean {similar[0]} instead of {shown}? (FILE:{column}={similar[0]})"
    for columns, renames in KNOWN_SETS.items():
        if set(columns) <= row.keys():
            return renames
    for present, missing in (("chosen", "rejected"), ("rejected", "chosen")):
        if present in row and missing not in row:
            return (
                f"a pair needs a column {missing} beside {present}; FILE:COLUMN={missing} names it"
            )
    for column, value in row.items():
        name = _name_of_turns(row, value)
        if name and fits({name: value} | row):
            return f"{column} holds messages; rename it (FILE:{column}={name})"
        if are_replies(value):
            return (
                f"{column} holds {len(value)} replies; make pairs of them with postgrad data "
                "prepare own from=FILE pairs=best_worst, or write one row per reply with response"
            )
    for column in PROMPTS:
        if "ground_truth" in row and isinstance(row.get(column), str):
            return f"read {column} as the prompt (FILE:{column}=prompt)"
    listed = _nearest(row, schemas)
    if not listed:
        return RENAMES
    return f"rename them (FILE:COLUMN=NEW_NAME) to one of: {'; '.join(listed)}"


def _is_fixed(row: Row, column: str, name: str, fits: Callable[[Row], bool]) -> bool:
    """Whether the row is read with this column under this name, and holds what such a one does.

    A column with a number (`output_1`) is one of several, not a misspelled one.
    """
    if column.rstrip("_0123456789") == name:
        return False
    if isinstance(row.get(column), list | dict) and name not in NESTED_COLUMNS:
        return False
    return fits({name if key == column else key: value for key, value in row.items()})


def _name_of_turns(row: Row, value: Any) -> str:
    """The column for a list of messages {role, content} or turns {from, value}; "" for others."""
    if not isinstance(value, list) or not value:
        return ""
    forms = ({"role", "content"}, {"from", "value"})
    if not all(
        isinstance(one, dict) and any(one.keys() >= form for form in forms) for one in value
    ):
        return ""
    has_reply = value[-1].get("role", value[-1].get("from")) in ("assistant", "gpt")
    return "messages" if has_reply or "chosen" in row else "prompt"


def _nearest(row: Row, schemas: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """The schemas that share most columns with the row and lack the fewest."""
    sharing: dict[tuple[str, ...], str] = {}
    for name, columns in schemas:
        if set(columns) & row.keys() and set(columns) - row.keys():
            sharing[columns] = name
    ranked = sorted(
        sharing, key=lambda columns: (len(set(columns) - row.keys()), -len(set(columns)))
    )
    return [f"{', '.join(columns)} ({sharing[columns]})" for columns in ranked[:MAX_SCHEMAS]]
