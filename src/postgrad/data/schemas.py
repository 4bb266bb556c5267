"""Rows as problems: one table of the schemas that are known, each with the columns that tell it and its converter.

A converter takes (row, stem of the file's name) and returns a Problem whose uid is the row's own or empty. Columns it does
not use go into `extra` by their names. `ground_truth` is "" in the schemas that have nothing to check a response against.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from postgrad.data.choices import plain_prompt, read_choices, sentence_prompt
from postgrad.data.dialogue import read_pair
from postgrad.data.rows import Row, RowError, checked_text, kind_of, text_of, truth_of, user_turn
from postgrad.problem import Problem

GSM8K_TRUTH = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")  # the last line's

# Columns by which others call an answer: a row with one of them, and in no schema that reads it, is not a prompt alone; it wants renaming.
ANSWERS = {
    "reward_model",
    "answer",
    "answers",
    "solution",
    "completion",
    "target",
    "output",
    "label",
    "chosen",
    "rejected",
}


@dataclass(frozen=True)
class Schema:
    """How to tell a file's schema and turn its rows into problems. `says` tells schemas with the same columns apart."""

    name: str
    columns: tuple[str, ...]
    convert: Callable[[Row, str], Problem]
    says: Callable[[Row], bool] = lambda row: True

    def fits(self, row: Row) -> bool:
        return all(column in row for column in self.columns) and self.says(row)


def recognize(row: Row) -> Schema:
    """The schema of a file, from its first row."""
    for schema in SCHEMAS:
        if schema.fits(row):
            return schema
    if len(row) == 1 and (mark := re.search(r"[;\t|]", str(next(iter(row))))):
        raise RowError(
            f"one column {next(iter(row))!r}; a csv file has commas between its columns, not {mark[0]!r}"
        )
    known = "; ".join(f"{', '.join(s.columns)} ({s.name})" for s in SCHEMAS)
    raise RowError(
        f"unknown schema with columns {', '.join(map(str, row)) or 'none'}; rename them to one of: {known}"
    )


def _verl(row: Row, stem: str) -> Problem:
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise RowError(
            f"reward_model must be an object with ground_truth, not {kind_of(reward_model)}"
        )
    demonstrations = _target(row["target"]) if row.get("target") is not None else ()
    extra = _rest(row, "prompt", "reward_model", "target")
    if extra.get("extra_info") is None:
        extra["extra_info"] = {}
    extra["reward_model"] = {
        key: value for key, value in reward_model.items() if key != "ground_truth"
    }
    return Problem(
        uid=_uid(row),
        messages=_messages(row, "prompt"),
        ground_truth=_rule_truth(reward_model),
        data_source=_source(row, ""),
        demonstrations=demonstrations,
        extra=extra,
    )


def _rule_truth(reward_model: Row) -> str:
    """A rule needs a truth; a judge (style "model", or a question for a monitor beside it) may have none."""
    truth = reward_model.get("ground_truth")
    if truth is None and (
        reward_model.get("style") == "model" or reward_model.get("raw_question_for_monitor")
    ):
        return ""
    return truth_of(truth, "reward_model.ground_truth")


def _preference(row: Row, stem: str) -> Problem:
    extra = _rest(row, "prompt", "ground_truth") | {
        name: _reply(row, name) for name in ("chosen", "rejected")
    }
    return Problem(
        _uid(row), _messages(row, "prompt"), _optional_truth(row), _source(row, stem), (), extra
    )


def _prompt_response(row: Row, stem: str, response: str = "response") -> Problem:
    extra = _rest(row, "prompt", response, "ground_truth")
    messages = _messages(row, "prompt")
    return Problem(
        _uid(row),
        messages,
        _optional_truth(row),
        _source(row, stem),
        (_reply(row, response),),
        extra,
    )


def _prompt(row: Row, stem: str) -> Problem:
    """Nothing to imitate: for RL, where a verifier of one's own or a judge may need no truth either, and for `postgrad eval`."""
    extra = _rest(row, "prompt", "ground_truth")
    return Problem(
        _uid(row), _messages(row, "prompt"), _optional_truth(row), _source(row, stem), (), extra
    )


def _mmlu(row: Row, stem: str) -> Problem:
    item = read_choices(row, stem)
    used = ("A", "B", "C", "D", "answer", "answerKey", "choices")
    extra = _rest(row, *used) | {"subject": item.subject, "options": list(item.options)}
    return Problem(
        _uid(row), user_turn(sentence_prompt(item)), item.letter, _source(row, "mmlu"), (), extra
    )


def _arc(row: Row, stem: str) -> Problem:
    item = read_choices(row, stem)
    extra = _rest(row, "choices", "answerKey") | {"options": list(item.options)}
    return Problem(
        _uid(row), user_turn(plain_prompt(item)), item.letter, _source(row, "arc_c"), (), extra
    )


def _transcripts(row: Row, stem: str) -> Problem:
    messages, chosen, rejected = read_pair(row["chosen"], row["rejected"])
    extra = _rest(row) | {"chosen": chosen, "rejected": rejected}
    return Problem(_uid(row), messages, _optional_truth(row), _source(row, "hh_rlhf"), (), extra)


def _dialogue_pair(row: Row, stem: str) -> Problem:
    """Two whole dialogues as messages, the same up to the last reply."""
    sides = {name: _messages(row, name) for name in ("chosen", "rejected")}
    chosen, rejected = sides.values()
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise RowError(
            "chosen and rejected must hold the same messages up to the last reply; or give the question in a column prompt"
        )
    extra = _rest(row, "ground_truth") | {name: _reply(row, name) for name in sides}
    return Problem(_uid(row), chosen[:-1], _optional_truth(row), _source(row, stem), (), extra)


def _gsm8k(row: Row, stem: str, question: str = "question") -> Problem:
    answer = text_of(row, "answer")
    truth = GSM8K_TRUTH.search(answer)
    if truth is None:
        raise RowError(
            "no ground truth: answer must end in `#### NUMBER`, as the first row's does; add it or remove the row"
        )
    messages, extra = _asked(row, question), _rest(row, question, "answer")
    return Problem(
        _uid(row),
        messages,
        truth[1].replace(",", ""),
        _source(row, "openai/gsm8k"),
        (answer,),
        extra,
    )


def _question_answer(
    row: Row, stem: str, question: str = "question", answer: str = "answer"
) -> Problem:
    """A question and its truth. Beside an answer, a text `solution` is the way to it: a demonstration."""
    truth = truth_of(row.get(answer), answer)
    if GSM8K_TRUTH.search(truth):
        raise RowError(
            f"{answer} ends in `####` and the truth, but the first row's does not; write all rows one way"
        )
    solution = row.get("solution") if question == "problem" else None
    shown = (checked_text(solution, "solution"),) if solution else ()
    used = (question, answer, "solution") if shown else (question, answer)
    return Problem(
        _uid(row), _asked(row, question), truth, _source(row, stem), shown, _rest(row, *used)
    )


def _asked(row: Row, name: str) -> tuple[dict[str, str], ...]:
    """The question: `prompt` may be messages, other columns are text."""
    return _messages(row, name) if name == "prompt" else user_turn(text_of(row, name))


def _instruction(row: Row, stem: str) -> Problem:
    """The output is both the truth a judge compares with and a demonstration. `input` is Alpaca's optional second part."""
    content, output = text_of(row, "instruction"), text_of(row, "output")
    if row.get("input"):
        content = f"{content}\n\n{text_of(row, 'input')}"
    extra = _rest(row, "instruction", "input", "output")
    return Problem(
        _uid(row),
        user_turn(content),
        truth_of(output, "output"),
        _source(row, stem),
        (output,),
        extra,
    )


def _chat(row: Row, stem: str, column: str = "messages") -> Problem:
    messages = _messages(row, column)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(
            f"{column} must end in an assistant message, which is the demonstration, with at least one message before it"
        )
    demonstrations, extra = (messages[-1]["content"],), _rest(row, column, "ground_truth")
    return Problem(
        _uid(row), messages[:-1], _optional_truth(row), _source(row, stem), demonstrations, extra
    )


def _sharegpt(row: Row, stem: str) -> Problem:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RowError(
            f"conversations must be a list of turns {{from, value}}, not {kind_of(turns)}"
        )
    turns = [
        {"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn.get("value")}
        if "from" in turn
        else turn
        for turn in turns
    ]
    return _chat(row | {"conversations": turns}, stem, "conversations")


SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's words; others are roles already


def _ends_in_hashes(row: Row) -> bool:
    return GSM8K_TRUTH.search(str(row["answer"])) is not None


def _names_no_truth(row: Row) -> bool:
    return "ground_truth" not in row


def _names_its_truth_if_any(row: Row) -> bool:
    return "ground_truth" in row or not ANSWERS & row.keys()


# The first that fits is taken, so the more particular stand first.
SCHEMAS = (
    Schema("verl", ("prompt", "reward_model", "data_source"), _verl),
    Schema("preference pairs", ("prompt", "chosen", "rejected"), _preference),
    Schema(
        "dialogue pairs",
        ("chosen", "rejected"),
        _dialogue_pair,
        says=lambda row: isinstance(row["chosen"], list),
    ),
    Schema("HH-RLHF", ("chosen", "rejected"), _transcripts),
    Schema("prompt and response", ("prompt", "response"), _prompt_response),
    Schema(
        "prompt and completion",
        ("prompt", "completion"),
        partial(_prompt_response, response="completion"),
    ),
    Schema("MMLU", ("question", "A", "B", "C", "D", "answer"), _mmlu),
    Schema("MMLU of the hub", ("question", "choices", "answer"), _mmlu),
    Schema("ARC", ("question", "choices", "answerKey"), _arc),
    Schema("GSM8K", ("question", "answer"), _gsm8k, says=_ends_in_hashes),
    Schema("question and answer", ("question", "answer"), _question_answer),
    Schema(
        "GSM8K as prompt",
        ("prompt", "answer"),
        partial(_gsm8k, question="prompt"),
        says=_ends_in_hashes,
    ),
    Schema(
        "prompt and answer",
        ("prompt", "answer"),
        partial(_question_answer, question="prompt"),
        says=_names_no_truth,
    ),
    Schema(
        "prompt and solution",
        ("prompt", "solution"),
        partial(_question_answer, question="prompt", answer="solution"),
        says=_names_no_truth,
    ),
    Schema(
        "problem and answer", ("problem", "answer"), partial(_question_answer, question="problem")
    ),
    Schema("instruction and output", ("instruction", "output"), _instruction),
    Schema("chat", ("messages",), _chat),
    Schema("ShareGPT", ("conversations",), _sharegpt),
    Schema(
        "prompt, with ground_truth if it has one",
        ("prompt",),
        _prompt,
        says=_names_its_truth_if_any,
    ),
)


def _rest(row: Row, *used: str) -> Row:
    """The columns no field of Problem took."""
    return {name: value for name, value in row.items() if name not in (*used, "uid", "data_source")}


def _messages(row: Row, name: str) -> tuple[dict[str, str], ...]:
    """A list of {role, content}, or a string for one user message. Null fields, which parquet adds, are left out."""
    value = row.get(name)
    if isinstance(value, str):
        return user_turn(text_of(row, name))
    if not isinstance(value, list) or not value:
        seen = "an empty list" if value == [] else kind_of(value)
        raise RowError(
            f"{name} must be a list of messages {{role, content}} or a string, not {seen}"
        )
    messages: list[dict[str, str]] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            seen = "an object without a role" if isinstance(message, dict) else kind_of(message)
            raise RowError(f"{name}[{i}] must be a message {{role, content}}, not {seen}")
        if "content" not in message:
            raise RowError(f"{name}[{i}] has no content; a message is {{role, content}}")
        kept = {
            key: checked_text(part, f"{name}[{i}].{key}")
            for key, part in message.items()
            if part is not None or key == "content"
        }
        messages.append(kept)
    return tuple(messages)


def _reply(row: Row, name: str) -> str:
    """A response: a string, or messages of which the last is the assistant's."""
    if isinstance(row.get(name), list):
        last = _messages(row, name)[-1]
        if last["role"] != "assistant":
            raise RowError(f"{name} must end in an assistant message, not {last['role']}")
        return last["content"]
    return text_of(row, name)


def _target(value: Any) -> tuple[str, ...]:
    """LUFFY's `target`: a list of assistant messages, of which some may have no content, or of strings."""
    if not isinstance(value, list):
        raise RowError(
            f"target must be a list of messages {{role, content}} or null, not {kind_of(value)}"
        )
    contents = [item.get("content") if isinstance(item, dict) else item for item in value]
    return tuple(
        checked_text(content, f"target[{i}].content")
        for i, content in enumerate(contents)
        if content is not None
    )


def _optional_truth(row: Row) -> str:
    return (
        truth_of(row["ground_truth"], "ground_truth") if row.get("ground_truth") is not None else ""
    )


def _source(row: Row, default: str) -> str:
    return (
        checked_text(row["data_source"], "data_source")
        if row.get("data_source") is not None
        else default
    )


def _uid(row: Row) -> str:
    """The row's own uid, or "" when the file has no column uid."""
    if "uid" not in row:
        return ""
    uid = row["uid"]
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        seen = "empty" if uid == "" else kind_of(uid)
        raise RowError(
            f"uid must be a string, not {seen}; fill it, or remove the column and uids are made from the content"
        )
    return checked_text(str(uid), "uid")
