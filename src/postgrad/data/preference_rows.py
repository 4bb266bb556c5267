"""Converters of rows with a better and a worse reply, one per schema of schemas.py.

They return a Problem as those of converters.py do. The texts of the two replies are `chosen` and
`rejected` in `extra`, and the messages end before them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from postgrad.data.dialogue import is_open_transcript, read_open_transcript, read_pair
from postgrad.data.instructions import INSTRUCTION_COLUMNS, read_instruction_messages
from postgrad.data.labels import read_label
from postgrad.data.messages import (
    check_last_is_assistant,
    check_reply,
    read_conversation,
    read_messages,
    text_of_only_message,
    without_weights,
)
from postgrad.data.passages import question_of
from postgrad.data.rows import (
    Row,
    RowError,
    data_source_of,
    optional_truth,
    text_of,
    uid_of,
    unused_columns,
    user_turn,
)
from postgrad.data.sharegpt import sharegpt_message
from postgrad.problem import Message, Problem

REJECTED_COLUMNS = ("rejected_messages", "rejected_response")  # ms-swift's, beside a response
# Other names of `chosen` and `rejected`: distilabel's, and those of StackExchange's pairs.
PAIR_NAMES = (("chosen_response", "rejected_response"), ("response_j", "response_k"))
SHP_COLUMNS = ("history", "human_ref_A", "human_ref_B", "labels")


def with_pair_names(row: Row) -> Row:
    """The row with its two replies in `chosen` and `rejected`."""
    for names in PAIR_NAMES:
        if "chosen" not in row and row.keys() >= set(names):
            renamed = dict(zip(names, ("chosen", "rejected"), strict=True))
            return {renamed.get(name, name): value for name, value in row.items()}
    return row


def read_preference(row: Row, stem: str, prompt: str = "prompt") -> Problem:
    """A prompt, in the column of that name, with a chosen and a rejected reply.

    The prompt `instruction` has `history` before and `input` or `context` after it, as in Alpaca.
    """
    if prompt == "instruction":
        messages = read_instruction_messages(row)
        return read_pair_of(row, stem, messages, used=INSTRUCTION_COLUMNS)
    if _dialogues_hold_prompt(row, prompt):
        return read_dialogue_pair(row, stem)
    messages = (
        read_messages(row, prompt) if prompt == "prompt" else user_turn(question_of(row, prompt))
    )
    return read_pair_of(row, stem, messages, used=(prompt,))


def read_conversation_pair(row: Row, stem: str, column: str) -> Problem:
    """A conversation that ends before the reply, with a chosen and a rejected one.

    This is LLaMA-Factory's `conversations` with the turns `chosen` and `rejected`.
    """
    messages = without_weights(_read_dialogue(row, column))
    if messages[-1]["role"] == "assistant":
        raise RowError(
            f"{column} ends in an assistant message, so chosen and rejected cannot reply to it; "
            "end it with the message that they reply to"
        )
    return read_pair_of(row, stem, messages, used=(column,))


def read_dialogue_pair(row: Row, stem: str) -> Problem:
    """Two lists of messages that are the same up to the last reply."""
    chosen = without_weights(_read_dialogue(row, "chosen"))
    rejected = without_weights(_read_dialogue(row, "rejected"))
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise RowError(
            "chosen and rejected must hold the same messages up to the last reply; "
            "or give the question in a column prompt"
        )
    _check_same_dialogue(row, chosen[:-1])
    return read_pair_of(row, stem, chosen[:-1], used=("prompt",))


def _check_same_dialogue(row: Row, prompt: tuple[Message, ...]) -> None:
    """Raises RowError if another column holds another prompt than the two dialogues.

    UltraFeedback has the chosen dialogue again in `messages`.
    """
    for name in ("messages", "conversations"):
        if not isinstance(row.get(name), list) or not row[name]:
            continue
        messages = without_weights(_read_dialogue(row, name))
        if messages[: len(prompt)] != prompt[: len(messages)]:
            raise RowError(
                f"{name} and chosen hold different messages; give chosen and rejected as one reply "
                f"each, or leave {name} out (FILE:{name}=unused)"
            )
    question = row.get("question")
    if isinstance(question, str) and not _is_asked(question, prompt):
        raise RowError(
            "no user of chosen asks the question; give chosen and rejected as one reply each, or "
            "leave question out (FILE:question=unused)"
        )


def read_transcript_pair(row: Row, stem: str) -> Problem:
    """HH-RLHF: two transcripts that differ in the last reply."""
    messages, chosen, rejected = read_pair(row["chosen"], row["rejected"])
    return Problem(
        uid=uid_of(row),
        messages=messages,
        ground_truth=optional_truth(row),
        data_source=data_source_of(row, "hh_rlhf"),
        extra=unused_columns(row, "ground_truth") | {"chosen": chosen, "rejected": rejected},
    )


def read_transcript_and_replies(row: Row, stem: str) -> Problem:
    """HH-RLHF with the transcript up to the reply in `prompt`, as in Dahoas/rm-static."""
    prompt = text_of(row, "prompt")
    if not is_open_transcript(prompt):
        raise RowError(
            "prompt is no transcript from Human: to Assistant:, as the first row's is; "
            "write all rows one way"
        )
    problem = read_pair_of(row, stem, read_open_transcript(prompt, "prompt"), used=("prompt",))
    for name in ("chosen", "rejected"):
        problem.extra[name] = problem.extra[name].strip()
    return replace(problem, data_source=data_source_of(row, "hh_rlhf"))


def read_shp(row: Row, stem: str) -> Problem:
    """SHP: a post and two comments. `labels` is 1 if A is the better one, and 0 if B is."""
    a_is_better = read_label(row["labels"])
    if a_is_better is None:
        raise RowError(
            f"labels is {row['labels']!r}; write 1 if human_ref_A is better, or 0 if human_ref_B is"
        )
    better, worse = ("A", "B") if a_is_better else ("B", "A")
    pair = {
        "chosen": text_of(row, f"human_ref_{better}"),
        "rejected": text_of(row, f"human_ref_{worse}"),
    }
    return read_pair_of(row | pair, stem, user_turn(text_of(row, "history")), used=SHP_COLUMNS)


def with_rejected_reply(row: Row, problem: Problem) -> Problem:
    """The problem of a row, as a pair if the row has ms-swift's reply that is worse.

    It is `rejected_response`, or the whole dialogue with it in `rejected_messages`. The chosen
    reply is the response of the row.
    """
    name = next((name for name in REJECTED_COLUMNS if row.get(name)), None)
    if name is None or "rejected" in problem.extra:
        return problem
    if not problem.demonstrations:
        raise RowError(
            f"{name} is beside no reply that is one text; end the messages with the better reply, "
            f"or leave {name} out (FILE:{name}=unused)"
        )
    if name == "rejected_messages" and _read_dialogue(row, name)[:-1] != problem.messages:
        raise RowError(
            "rejected_messages must hold the messages of the row up to the last reply; "
            "or give that reply alone in rejected_response"
        )
    extra = {key: value for key, value in problem.extra.items() if key != name}
    extra["chosen"] = problem.demonstrations[0]
    extra["rejected"] = _read_reply(row, name, problem.messages)
    return replace(problem, extra=extra)


def read_pair_of(
    row: Row, stem: str, messages: tuple[Message, ...], used: tuple[str, ...]
) -> Problem:
    """The problem of a prompt with the row's two replies; `used` are the columns of the prompt."""
    extra = unused_columns(row, *used, "ground_truth")
    for name in ("chosen", "rejected"):
        extra[name] = _read_reply(row, name, messages)
    return Problem(
        uid=uid_of(row),
        messages=messages,
        ground_truth=optional_truth(row),
        data_source=data_source_of(row, stem),
        extra=extra,
    )


def _dialogues_hold_prompt(row: Row, prompt: str) -> bool:
    """Whether the replies are whole dialogues in which a user says the text of the prompt.

    They may have more messages before or after it: a system message, or several turns.
    """
    text = row.get(prompt)
    if not isinstance(text, str):
        return False
    names = ("chosen", "rejected")
    for name in names:
        value = row.get(name)
        if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
            return False
        if not _is_asked(text, _read_dialogue(row, name)[:-1]):
            return False
    return True


def _is_asked(text: str, messages: Sequence[Message]) -> bool:
    """Whether a user says the text in one of the messages."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return text.strip() in [str(content).strip() for content in asked]


def _read_dialogue(row: Row, name: str) -> tuple[Message, ...]:
    """The messages of a column: a list of messages or of ShareGPT's turns, or one of either."""
    value: Any = row.get(name)
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list):
        turns = [sharegpt_message(turn) if isinstance(turn, dict) else turn for turn in turns]
    return read_conversation({name: turns}, name)


def _read_reply(row: Row, name: str, prompt: tuple[Message, ...]) -> str:
    """One reply of the assistant: a text, a message, or a list of messages.

    The list may start with the messages of the prompt; one assistant message must follow.
    """
    value = row.get(name)
    if isinstance(value, list) and value and isinstance(value[0], str):
        if len(value) > 1:
            raise RowError(f"{name} has {len(value)} replies; write one row per pair")
        value = value[0]
    if not isinstance(value, list | dict):
        return text_of({**row, name: value} if name in row else row, name)
    messages = _read_dialogue(row, name)
    if without_weights(messages[: len(prompt)]) == prompt:
        messages = messages[len(prompt) :] or messages
    check_last_is_assistant(messages, name)
    check_reply(messages[-1], name)
    text = text_of_only_message(messages)
    if len(messages) == 1 and not text:
        raise RowError(f"{name} calls a tool; a reply is a text")
    if not text:
        raise RowError(
            f"{name} must be one assistant message, not {len(messages)}; move the others to the "
            "column prompt, or leave that out of whole dialogues (FILE:prompt=unused)"
        )
    if not text[0].strip():
        raise RowError(f"{name} is empty; fill it or remove the row")
    return text[0]
