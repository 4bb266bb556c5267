"""How a row of each shape becomes the fields of a Problem.

Each function takes (row with the names of the shape, file name without extension). `extra` in its
result are further columns for `problem.extra`.
"""

import re
from typing import Any

from postgrad.data.rows.choices import SECOND_ANSWERS, plain_prompt, read_choices, sentence_prompt
from postgrad.data.rows.messages import (
    ROLES,
    check_last_is_assistant,
    check_replies,
    check_reply,
    read_conversation,
    read_messages,
    read_tools,
    text_of_only_message,
    without_weights,
)
from postgrad.data.rows.values import (
    Row,
    RowError,
    checked_text,
    is_missing,
    text_of,
    truth_of,
    type_name,
    user_turn,
)
from postgrad.problem import Conversation, Message

Fields = dict[str, Any]
FINAL_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")  # how a worked solution of GSM8K ends


def verl(row: Row, stem: str) -> Fields:
    """verl's columns: the truth is in `reward_model`, which verifiers may read."""
    reward_model = row["reward_model"]
    if not isinstance(reward_model, dict):
        raise RowError(
            f"reward_model must be an object with ground_truth, not {type_name(reward_model)}"
        )
    truth = reward_model.get("ground_truth")
    is_judged = reward_model.get("style") == "model" or bool(
        reward_model.get("raw_question_for_monitor")
    )
    shown = dict(reward_model)
    if isinstance(truth, str | None):  # others keep their type for verl's functions
        shown.pop("ground_truth", None)
    response = () if row.get("completion") is None else (text_of(row, "completion"),)
    return {
        "messages": _prompt(row),
        "tools": read_tools(row),
        "ground_truth": ""
        if truth is None and is_judged
        else truth_of(truth, "reward_model.ground_truth"),
        "demonstrations": _targets(row.get("target")) or response,
        "extra": {"reward_model": shown, "extra_info": row.get("extra_info") or {}},
    }


def pair(row: Row, stem: str) -> Fields:
    """Return two replies to `prompt`, chosen and rejected, or two dialogues with different ends."""
    sides = {name: _reply(row, name) for name in ("chosen", "rejected")}
    dialogues = [turns[:-1] for turns in sides.values() if len(turns) > 1]
    if "prompt" not in row and not dialogues:
        raise RowError(
            "chosen and rejected are replies alone; give the question in a column prompt "
            "(FILE:COLUMN=prompt; HH-RLHF's transcripts: postgrad data prepare hh_rlhf)"
        )
    prompt = _prompt(row) if "prompt" in row else _with_system(row, dialogues[0])
    for dialogue in dialogues:
        if dialogue != prompt and _with_system(row, dialogue) != prompt:
            raise RowError(
                "chosen and rejected must hold the messages of the prompt up to the last reply; "
                "give the replies alone, or leave the prompt out (FILE:prompt=unused)"
            )
    if len(dialogues) == 1 and "prompt" not in row:
        raise RowError("one of chosen and rejected is a reply alone; give both as dialogues")
    replies = {name: _reply_text(turns[-1], name) for name, turns in sides.items()}
    return {
        "messages": prompt,
        "tools": read_tools(row),
        "ground_truth": _truth(row),
        "extra": replies,
    }


def choice(row: Row, stem: str) -> Fields:
    """Return a multiple-choice question: the prompt has the options, the truth is a letter."""
    item = read_choices(row, stem)
    is_arc = "answerKey" in row
    named = ("question", "category", *SECOND_ANSWERS)
    subject = {} if is_arc else {"subject": item.subject}
    return {
        "messages": _with_system(
            row, user_turn((plain_prompt if is_arc else sentence_prompt)(item))
        ),
        "tools": read_tools(row),
        "ground_truth": item.letter,
        "extra": {name: row[name] for name in named if name in row}
        | subject
        | {"options": list(item.options)},
    }


def messages(row: Row, stem: str) -> Fields:
    """Return a conversation: SFT trains on its assistant messages, RL answers the last of them.

    Messages that end with the user's are a prompt.
    """
    turns = _with_system(row, read_conversation(row, "messages"))
    tools = read_tools(row)
    role = turns[-1]["role"]
    if role == "user":
        return {"messages": without_weights(turns), "tools": tools, "ground_truth": _truth(row)}
    if role not in ROLES:
        raise RowError(
            f"messages end in a message of {role!r}, which is no role of a chat; "
            "the model's messages are those of the role assistant"
        )
    check_last_is_assistant(turns, "messages")
    if len(turns) < 2:
        raise RowError("messages must hold at least one message before the assistant's")
    check_replies(turns)
    return {
        "messages": without_weights(turns[:-1]),
        "ground_truth": _truth(row),
        "demonstrations": text_of_only_message(turns[-1:]),
        "conversation": Conversation(turns, tools),
    }


def completion(row: Row, stem: str) -> Fields:
    """Return a prompt and its completion, a text or messages.

    `label` says whether it is good (KTO).
    """
    prompt, tools = _prompt(row), read_tools(row)
    if isinstance(row["completion"], list):
        reply = read_conversation(row, "completion")
        check_last_is_assistant(reply, "completion")
        check_replies(reply)
    else:
        reply = ({"role": "assistant", "content": text_of(row, "completion")},)
    conversation = None
    if tools or isinstance(row["completion"], list):
        conversation = Conversation((*prompt, *reply), tools, num_prompt=len(prompt))
    return {
        "messages": prompt,
        "ground_truth": _truth(row),
        "demonstrations": text_of_only_message(reply),
        "conversation": conversation,
        "extra": {name: row[name] for name in ("label", "kto_tag") if name in row},
    }


def problem(row: Row, stem: str) -> Fields:
    """Return a prompt with its ground truth, and LUFFY's demonstrations in `target`.

    A truth that is a worked solution of GSM8K is its last line, and a demonstration.
    """
    truth = _truth(row)
    fields: Fields = {"messages": _prompt(row), "tools": read_tools(row)}
    if solution := FINAL_ANSWER.search(truth):
        return fields | {
            "ground_truth": solution[1].replace(",", ""),
            "demonstrations": (truth,),
            "data_source": "openai/gsm8k",
        }
    return fields | {"ground_truth": truth, "demonstrations": _targets(row.get("target"))}


def text(row: Row, stem: str) -> Fields:
    """Return a plain text: SFT trains on all of it; no other method reads it."""
    plain = text_of(row, "text")
    return {"messages": user_turn(plain), "conversation": Conversation((), text=plain)}


def _prompt(row: Row) -> tuple[Message, ...]:
    """Return the messages of `prompt`, with `system` before a text and `input` after it."""
    if isinstance(row.get("prompt"), list) or is_missing(row.get("input")):
        return _with_system(row, read_messages(row, "prompt"))
    content = f"{text_of(row, 'prompt')}\n\n{text_of(row, 'input')}"
    return _with_system(row, user_turn(content))


def _with_system(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages after that of the column `system`, unless they have one."""
    if not row.get("system") or turns[0]["role"] == "system":
        return turns
    return ({"role": "system", "content": text_of(row, "system")}, *turns)


def _truth(row: Row) -> str:
    """Return the text of the ground truth; "" if the row has none: null or NaN."""
    truth = row.get("ground_truth")
    if is_missing(truth) and not isinstance(truth, str):
        return ""
    return truth_of(truth, "ground_truth")


def _targets(value: Any) -> tuple[str, ...]:
    """Return LUFFY's `target`: a list of assistant messages, some without content, or of texts."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(
            f"target must be a list of messages {{role, content}} or null, not {type_name(value)}"
        )
    texts: list[str] = []
    for i, item in enumerate(value):
        if isinstance(item, dict):
            check_reply(item, f"target[{i}]")
        content = item.get("content") if isinstance(item, dict) else item
        if content is not None:
            texts.append(checked_text(content, f"target[{i}].content"))
    return tuple(texts)


def _reply(row: Row, name: str) -> tuple[Message, ...]:
    """Return a reply of a pair: a text, a message, or a dialogue that ends with it."""
    value = row[name]
    if not isinstance(value, list | dict):
        return ({"role": "assistant", "content": text_of(row, name)},)
    turns = read_conversation({name: [value] if isinstance(value, dict) else value}, name)
    check_last_is_assistant(turns, name)
    check_reply(turns[-1], name)
    return without_weights(turns)


def _reply_text(message: Message, name: str) -> str:
    if "tool_calls" in message:
        raise RowError(f"{name} calls a tool; a reply is a text")
    if not message["content"].strip():
        raise RowError(f"{name} is empty; fill it or remove the row")
    return message["content"]
