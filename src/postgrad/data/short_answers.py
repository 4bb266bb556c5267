"""Columns with the short answer to a question, beside a longer answer or a response."""

from postgrad.data.rows import Row, RowError, is_missing, optional_truth, truth_of

SHORT_ANSWERS = (
    "ground_truth",
    "reference_answer",
    "final_answer",
    "expected_answer",
    "correct_answer",
    "gold_answer",
    "answer_number",  # MGSM's
)


def short_answer(row: Row) -> str:
    """The answer in a column of its own beside a response; "" if there is none."""
    for name in ("ground_truth", "answer", *SHORT_ANSWERS):
        value = row.get(name)
        if isinstance(value, str | int | float) and not is_missing(value):
            return truth_of(value, name)
    return optional_truth(row)


def check_only_truth(row: Row, truth: str, question: str, answer: str) -> None:
    """Raises RowError if another column has another answer, as MegaScience's reference_answer.

    Args:
        row: the columns by name.
        truth: the text of the answer.
        question: the column of the question.
        answer: the column of the answer.
    """
    for name in SHORT_ANSWERS:
        value = row.get(name)
        if name == answer or not isinstance(value, str | int | float) or is_missing(value):
            continue
        if truth and truth_of(value, name).strip() != truth.strip():
            prompt = "" if question in ("question", "prompt") else f":{question}=prompt"
            raise RowError(
                f"{answer} and {name} hold different texts; leave one out (FILE:{name}=unused), or "
                f"read one as the response (FILE{prompt}:{answer}=response:{name}=ground_truth)"
            )
