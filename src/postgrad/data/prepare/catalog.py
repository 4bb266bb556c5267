"""The data sets that `postgrad data prepare` knows, in one table.

A data set of your own needs no entry: `own` reads any file that load_problems reads.
"""

from postgrad.data.encode.styles import question_of
from postgrad.data.prepare.base import Context, DataSet, Draft, Drop, Option, select_columns
from postgrad.data.prepare.chat import CHAT
from postgrad.data.prepare.choice import CHOICE
from postgrad.data.prepare.code import CODE
from postgrad.data.prepare.math import MATH
from postgrad.data.prepare.open_math import OPEN_MATH
from postgrad.data.rows.labels import LABEL_COLUMNS
from postgrad.data.rows.messages import WEIGHT, reasoning_field
from postgrad.data.rows.shapes import read_row
from postgrad.data.rows.values import Row, RowError
from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Conversation, Problem

INFO_COLUMNS = ("difficulty", "subject", "level", "topic", "options")  # moved to extra_info
KEPT_COLUMNS = ("chosen", "rejected", *LABEL_COLUMNS)
REPLACED_INFO = ("split", "index", "question", "raw_problem")  # `prepare` writes its own


def draft_of_problem(problem: Problem) -> Draft:
    """The Draft of a problem that was read from a file of a known schema."""
    _check_fits_schema(problem)
    extra = problem.extra
    info = select_columns(extra.get("extra_info") or {}, extra.get("extra_info") or {})
    info |= select_columns(extra, INFO_COLUMNS)
    reward = extra.get("reward_model") or {}
    roles = [message["role"] for message in problem.messages if message["role"] != "system"]
    question = problem.messages[-1]["content"]
    if roles == ["user"]:
        question = question_of(problem.messages)
    return Draft(
        question=question,
        truth=problem.ground_truth,
        demonstrations=problem.demonstrations,
        extra={key: value for key, value in info.items() if key not in REPLACED_INFO},
        reward={
            key: str(value) for key, value in reward.items() if key != "style" and value is not None
        },
        columns={name: extra[name] for name in KEPT_COLUMNS if name in extra},
        dialogue=problem.messages,
        data_source=problem.data_source,
    )


def _check_fits_schema(problem: Problem) -> None:
    """Raises RowError for a conversation that `prompt` and `target` of the schema cannot hold."""
    conversation = problem.conversation or Conversation((), problem.tools)
    messages = (*problem.messages, *conversation.messages)
    has_calls = any("tool_calls" in message for message in messages)
    has_several = conversation.num_prompt and not problem.demonstrations
    has_reasoning = bool(reasoning_field(messages))
    has_weights = any(WEIGHT in message for message in conversation.messages)
    is_text = bool(conversation.text)
    if any((has_calls, conversation.tools, has_several, has_reasoning, has_weights, is_text)):
        raise RowError(
            "plain texts, tool calls, tools, reasoning_content, weights and completions of several "
            "messages cannot be prepared; train on the file itself"
        )


def convert_own(row: Row, context: Context) -> Draft:
    """A row of any schema that training reads."""
    problem = read_row(row, context.stem)
    if context.options["kind"] == "pairs" and "rejected" not in problem.extra:
        raise Drop("has no chosen and rejected reply")
    return draft_of_problem(problem)


SETS: dict[str, DataSet] = {
    **MATH,
    **OPEN_MATH,
    **CHOICE,
    **CHAT,
    **CODE,
    "own": DataSet(
        "files of your own in any schema that training reads",
        "",
        {"train": ()},
        convert_own,
        "",
        options={
            "kind": Option("all", "keep all rows, or pairs only", ("all", "pairs")),
        },
        compares_replies=True,
    ),
}
# Options of every data set.
COMMON: dict[str, Option] = {
    "split": Option("", "which split; default: the first of the table"),
    "style": Option("", "prompt style; default: the data set's own"),
    "source": Option("", "keep only the rows of one data_source, for files that hold several"),
    "n": Option(0, "keep only the first n problems; 0: all"),
    "duplicates": Option("drop", "problems that repeat another one", ("drop", "keep")),
    "data_source": Option("", "write this data_source, which selects the verifier"),
}


def find_set(name: str) -> DataSet:
    """The data set of this name; `hh-rlhf` and `hh_rlhf` are the same."""
    by_name = {known.replace("-", "_"): known for known in SETS}
    known = by_name.get(name.lower().replace("-", "_"))
    if known is None:
        raise ConfigError(f"no data set {name}; {did_you_mean(name, SETS)}")
    return SETS[known]
