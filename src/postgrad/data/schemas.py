"""Known schemas of rows: a table of columns and the converter of each.

The first row of a file decides which schema the file has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from postgrad.data.choices import LETTERED_COLUMNS
from postgrad.data.compared_rows import COMPARISONS
from postgrad.data.converters import (
    GSM8K_TRUTH,
    read_arc,
    read_chat,
    read_gsm8k,
    read_instruction,
    read_math,
    read_mmlu,
    read_open_math_reasoning,
    read_prompt,
    read_prompt_response,
    read_query_and_calls,
    read_question_answer,
    read_sharegpt,
    read_text,
    read_verl,
    with_conversation_column,
)
from postgrad.data.dialogue import HUMAN_MARK, is_open_transcript, is_transcript
from postgrad.data.instructions import is_history
from postgrad.data.lost_texts import check_texts
from postgrad.data.messages import (
    SHAREGPT_COLUMNS,
    parse_nested,
    with_system_column,
    with_tools_column,
)
from postgrad.data.preference_rows import (
    SHP_COLUMNS,
    read_conversation_pair,
    read_dialogue_pair,
    read_preference,
    read_shp,
    read_transcript_and_replies,
    read_transcript_pair,
    with_pair_names,
    with_rejected_reply,
)
from postgrad.data.rows import Row, RowError
from postgrad.data.schema_hints import rename_hint
from postgrad.data.unsupported_columns import refuse_unsupported
from postgrad.problem import Problem

# Columns that hold an answer under some other name. A row that has one, and fits no schema that
# reads it, is not a prompt alone: its columns must be renamed.
ANSWER_COLUMNS = {
    "reward_model",
    "answer",
    "answers",
    "solution",
    "completion",
    "output",
    "label",
    "chosen",
    "rejected",
}
# Columns of programs and their tests. A text beside one is a task (MBPP), not a text to imitate.
CODE_COLUMNS = {"code", "test_list", "canonical_solution"}
# Columns that hold a question beside `prompt`, which may then be another text.
QUESTION_COLUMNS = ("instruction", "query", "question")


@dataclass(frozen=True)
class Schema:
    """One known layout of columns.

    Attributes:
        name: for error messages.
        columns: columns that a row of this schema has.
        convert: turns (row, file name without extension) into a problem.
        matches: tells schemas with the same columns apart.
        truth: the column that holds the ground truth, if the row has one.
    """

    name: str
    columns: tuple[str, ...]
    convert: Callable[[Row, str], Problem]
    matches: Callable[[Row], bool] = lambda row: True
    truth: str = "ground_truth"

    def fits(self, row: Row) -> bool:
        """Whether a row is in this schema."""
        return all(column in row for column in self.columns) and self.matches(row)

    def read(self, row: Row, stem: str) -> Problem:
        """The problem of a row, with the columns `system` or `system_prompt`, and `tools`.

        Raises:
            RowError: the row does not fit, or a text of it would be lost.
        """
        problem = with_conversation_column(row, self.convert(row, stem))
        problem = with_rejected_reply(row, problem)
        if is_history(problem.extra.get("history")):
            raise RowError(
                "history has turns before the prompt, and is only read beside instruction; write "
                "the row as a conversation in a column messages"
            )
        check_texts(row, problem)
        return with_tools_column(row, with_system_column(row, problem))


def normalize_row(row: Row) -> Row:
    """A row of a file with parsed JSON text and known names of its replies, as schemas read it.

    Raises:
        RowError: a column would be lost.
    """
    row = with_pair_names(parse_nested(row))
    refuse_unsupported(row)
    return row


def recognize(row: Row) -> Schema:
    """The schema of a file, from its first row.

    Raises:
        RowError: no schema fits; the message lists the known ones.
    """
    for schema in SCHEMAS:
        if schema.fits(row):
            return schema
    if len(row) == 1:
        column = str(next(iter(row)))
        if "|" in column:
            raise RowError(
                f"one column {column!r}; "
                "a csv file has commas, semicolons or tabs between its columns, not '|'"
            )
    columns = ", ".join(map(str, row)) or "none"
    raise RowError(f"unknown schema with columns {columns}; {_hint(row)}")


def _hint(row: Row) -> str:
    schemas = [(schema.name, schema.columns) for schema in SCHEMAS]
    return rename_hint(row, schemas, lambda row: any(schema.fits(row) for schema in SCHEMAS))


def _answer_ends_in_hashes(row: Row) -> bool:
    return GSM8K_TRUTH.search(str(row["answer"])) is not None


def _has_no_ground_truth(row: Row) -> bool:
    return "ground_truth" not in row


def _has_no_instruction(row: Row) -> bool:
    """Whether `input` is a prompt of its own, not what an instruction is about (Alpaca)."""
    return "instruction" not in row


def _label_is_truth(row: Row) -> bool:
    """A label is a ground truth, unless it says whether a response is desirable."""
    return _has_no_ground_truth(row) and not isinstance(row["label"], bool)


def _has_ground_truth_or_no_answer(row: Row) -> bool:
    return "ground_truth" in row or not ANSWER_COLUMNS & {str(name).lower() for name in row}


def _is_text_alone(row: Row) -> bool:
    """The other columns belong to no schema: text beside an answer is a question, not a text.

    A `label` is allowed: TRL trains on the text of data sets for classification.
    """
    columns = {column for schema in SCHEMAS for column in schema.columns}
    others = columns | ANSWER_COLUMNS | CODE_COLUMNS | {"ground_truth"}
    return not others - {"text", "label"} & row.keys()


def _chosen_is_reply(row: Row, prompt: str) -> bool:
    """Whether `chosen` is a reply to the column `prompt`: a text or one message."""
    chosen = row["chosen"]
    if isinstance(chosen, list):
        return len(chosen) == 1
    return isinstance(chosen, str | dict) and not _chosen_is_transcript(row, prompt)


def _chosen_is_transcript(row: Row, prompt: str) -> bool:
    """Whether `chosen` is a transcript, as in HH-RLHF, and not a reply to the column `prompt`.

    A reply may start with "Human:", if the prompt asks for a dialogue. So a transcript starts with
    HH-RLHF's blank line, or has the text of the prompt in it.
    """
    chosen, text = row["chosen"], row[prompt]
    if not is_transcript(chosen):
        return False
    return chosen.startswith(HUMAN_MARK) or (isinstance(text, str) and text.strip() in chosen)


def _prompt_is_transcript(row: Row) -> bool:
    """Whether `prompt` is HH-RLHF's transcript up to the reply."""
    return is_open_transcript(row["prompt"]) and not _chosen_is_transcript(row, "prompt")


def _read_only_prompt(row: Row, stem: str, response: str = "response") -> Problem:
    """As read_prompt_response. Raises RowError if another column holds another question.

    So Self-OSS-Instruct is not trained on the prompt that its instructions were made with.
    """
    prompt = row.get("prompt")
    for name in QUESTION_COLUMNS:
        question = row.get(name)
        if not isinstance(question, str) or not isinstance(prompt, str) or not question.strip():
            continue
        if question.strip() not in prompt:
            raise RowError(
                f"prompt and {name} hold different texts, and {response} answers one of them; "
                f"leave the other out (FILE:prompt=unused or FILE:{name}=unused)"
            )
    return read_prompt_response(row, stem, response)


# The first schema that fits is used, so the more specific ones come first.
SCHEMAS = (
    Schema("verl", ("prompt", "reward_model"), read_verl, truth="reward_model"),
    Schema(
        "HH-RLHF with a prompt",
        ("prompt", "chosen", "rejected"),
        read_transcript_and_replies,
        matches=_prompt_is_transcript,
    ),
    Schema(
        "preference pairs",
        ("prompt", "chosen", "rejected"),
        read_preference,
        matches=lambda row: not _chosen_is_transcript(row, "prompt"),
    ),
    *(
        Schema(
            f"{prompt} with pairs",
            (prompt, "chosen", "rejected"),
            partial(read_preference, prompt=prompt),
            matches=partial(_chosen_is_reply, prompt=prompt),
        )
        for prompt in ("question", "instruction", "input", "query")
    ),
    *(
        Schema(
            f"{column} with pairs",
            (column, "chosen", "rejected"),
            partial(read_conversation_pair, column=column),
            matches=partial(_chosen_is_reply, prompt=column),
        )
        for column in ("conversations", "messages")
    ),
    Schema(
        "dialogue pairs",
        ("chosen", "rejected"),
        read_dialogue_pair,
        matches=lambda row: isinstance(row["chosen"], list),
    ),
    Schema(
        "HH-RLHF",
        ("chosen", "rejected"),
        read_transcript_pair,
        matches=lambda row: is_transcript(row["chosen"]) or is_transcript(row["rejected"]),
    ),
    Schema("SHP", SHP_COLUMNS, read_shp),
    *(Schema(one.name, one.columns, one.read) for one in COMPARISONS),
    Schema("prompt and response", ("prompt", "response"), _read_only_prompt),
    Schema(
        "prompt and completion",
        ("prompt", "completion"),
        partial(_read_only_prompt, response="completion"),
    ),
    Schema("MMLU", ("question", "A", "B", "C", "D", "answer"), read_mmlu, truth="answer"),
    Schema("Global-MMLU", ("question", *LETTERED_COLUMNS, "answer"), read_mmlu, truth="answer"),
    Schema("MMLU of the hub", ("question", "choices", "answer"), read_mmlu, truth="answer"),
    Schema(
        "MMLU-Pro",
        ("question", "options", "answer"),
        partial(read_mmlu, data_source="mmlu_pro"),
        matches=lambda row: isinstance(row["options"], list | dict),
        truth="answer",
    ),
    Schema("ARC", ("question", "choices", "answerKey"), read_arc, truth="answerKey"),
    Schema(
        "GSM8K",
        ("question", "answer"),
        read_gsm8k,
        matches=_answer_ends_in_hashes,
        truth="answer",
    ),
    Schema("question and answer", ("question", "answer"), read_question_answer, truth="answer"),
    Schema(
        "GSM8K as prompt",
        ("prompt", "answer"),
        partial(read_gsm8k, question="prompt"),
        matches=_answer_ends_in_hashes,
        truth="answer",
    ),
    Schema(
        "prompt and answer",
        ("prompt", "answer"),
        partial(read_question_answer, question="prompt"),
        matches=_has_no_ground_truth,
        truth="answer",
    ),
    Schema(
        "prompt and solution",
        ("prompt", "solution"),
        partial(read_question_answer, question="prompt", answer="solution"),
        matches=_has_no_ground_truth,
        truth="solution",
    ),
    *(
        Schema(
            f"{prompt} and response",
            (prompt, "response"),
            partial(read_prompt_response, response="response", prompt=prompt),
        )
        for prompt in ("question", "query")
    ),
    Schema(
        "inputs and targets",
        ("inputs", "targets"),
        partial(read_prompt_response, response="targets", prompt="inputs"),
    ),
    Schema(
        "input and output",
        ("input", "output"),
        partial(read_prompt_response, response="output", prompt="input"),
        matches=_has_no_instruction,
    ),
    Schema(
        "prompt and label",
        ("prompt", "label"),
        partial(read_question_answer, question="prompt", answer="label"),
        matches=_label_is_truth,
        truth="label",
    ),
    Schema(
        "input and label",
        ("input", "label"),
        partial(read_question_answer, question="input", answer="label"),
        matches=lambda row: _label_is_truth(row) and _has_no_instruction(row),
        truth="label",
    ),
    Schema(
        "problem and answer",
        ("problem", "answer"),
        partial(read_question_answer, question="problem"),
        truth="answer",
    ),
    Schema(
        "OpenMathReasoning",
        ("problem", "expected_answer", "generated_solution"),
        read_open_math_reasoning,
        truth="expected_answer",
    ),
    Schema("MATH", ("problem", "solution"), read_math, truth="solution"),
    Schema("instruction and output", ("instruction", "output"), read_instruction, truth="output"),
    Schema(
        "instruction and response",
        ("instruction", "response"),
        partial(read_instruction, output="response"),
        truth="response",
    ),
    Schema("xLAM", ("query", "tools", "answers"), read_query_and_calls),
    Schema("chat", ("messages",), read_chat),
    *(
        Schema("ShareGPT", (column,), partial(read_sharegpt, column=column))
        for column in SHAREGPT_COLUMNS
    ),
    Schema(
        "prompt, with ground_truth if it has one",
        ("prompt",),
        read_prompt,
        matches=_has_ground_truth_or_no_answer,
    ),
    Schema("text", ("text",), read_text, matches=_is_text_alone),
)
