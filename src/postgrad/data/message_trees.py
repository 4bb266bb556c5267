"""OpenAssistant's message trees as rows: each user message with its replies is one row.

A file has one message per row, whose `parent_id` names the message before it, or one tree per row
with nested `replies`. A row of the result has the messages up to a user message as `prompt`, its
best reply as `completion`, and the worst one as `rejected_response`.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from postgrad.data.rows import Row
from postgrad.errors import ConfigError

ROLES = {"prompter": "user", "assistant": "assistant"}
MESSAGE_COLUMNS = {"message_id", "parent_id", "role", "text"}  # of one message per row
KEPT_COLUMNS = ("lang", "message_tree_id")

Located = tuple[str, Row]


def join_trees(rows: Iterable[Located], label: str) -> Iterator[Located]:
    """The rows, with message trees as rows of a prompt and its replies. `label` starts errors.

    Other rows are not changed. The first row decides.

    Raises:
        ConfigError: a message has no role of the two, its parent is not in the file, or it is
            there twice.
    """
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    rows = chain([first], rows)
    if first[1].keys() >= MESSAGE_COLUMNS:
        yield from _read_messages(list(rows), label)
    elif _is_nested(first[1]):
        flat = [message for location, row in rows for message in _flatten(location, row, label)]
        yield from _read_messages(flat, label)
    else:
        yield from rows


def _is_nested(row: Row) -> bool:
    root = row.get("prompt")
    return isinstance(root, dict) and "replies" in root and "message_id" in root


def _flatten(location: str, row: Row, label: str) -> Iterator[Located]:
    """The messages of one nested tree, parents first."""
    waiting: list[tuple[Any, Any]] = [(row.get("prompt"), None)]
    while waiting:
        node, parent = waiting.pop(0)
        if not isinstance(node, dict) or "message_id" not in node:
            raise ConfigError(
                f"{label}: {location}: prompt must be a message of a tree with message_id and "
                "replies, as the first row's is"
            )
        tree = {"message_tree_id": row.get("message_tree_id")}
        yield location, {**tree, **node, "parent_id": parent}
        waiting += [(reply, node["message_id"]) for reply in node.get("replies") or []]


def _read_messages(rows: list[Located], label: str) -> Iterator[Located]:
    """One row per user message that has replies, in the order of its replies in the file."""
    by_id: dict[Any, Row] = {}
    replies: dict[Any, list[Located]] = {}
    for location, row in rows:
        _check_message(row, f"{label}: {location}")
        if row.get("message_id") in by_id:
            raise ConfigError(
                f"{label}: {location}: the file has the message {row.get('message_id')} twice; "
                "remove one of them"
            )
        by_id[row.get("message_id")] = row
        if row["role"] == "assistant":
            replies.setdefault(row.get("parent_id"), []).append((location, row))
    if not replies:
        raise ConfigError(
            f"{label}: the trees have no replies of an assistant; give a file with whole trees"
        )
    for parent, located in replies.items():
        kept = [one for one in located if _is_kept(one[1])]
        path = _path_to(parent, by_id, located[0], label)
        if kept and all(_is_kept(message) for message in path):
            yield from _join_replies(path, kept)


def _check_message(row: Row, place: str) -> None:
    """Raises ConfigError if a message of a tree has no id, no role, or a rank that is no number."""
    if not isinstance(row.get("message_id"), str) or not isinstance(
        row.get("parent_id"), str | None
    ):
        raise ConfigError(f"{place}: message_id and parent_id must be texts; parent_id may be null")
    if row.get("role") not in list(ROLES):
        raise ConfigError(
            f"{place}: role is {row.get('role')!r}; the messages of a tree are of a prompter or an "
            "assistant"
        )
    if not isinstance(row.get("rank"), int | float | None):
        raise ConfigError(f"{place}: rank is {row['rank']!r}; write a number, 0 for the best reply")


def _is_kept(message: Row) -> bool:
    """Whether a message was neither deleted nor refused by the reviewers."""
    return not message.get("deleted") and message.get("review_result") is not False


def _path_to(message_id: Any, by_id: dict[Any, Row], reply: Located, label: str) -> list[Row]:
    """The messages from the root to this one. Raises ConfigError if one is not in the file."""
    path: list[Row] = []
    while message_id is not None:
        if message_id not in by_id or len(path) > len(by_id):
            raise ConfigError(
                f"{label}: {reply[0]}: the message {message_id} before it is not in the file; "
                "keep whole trees in one file"
            )
        path.append(by_id[message_id])
        message_id = path[-1].get("parent_id")
    if not path:
        raise ConfigError(
            f"{label}: {reply[0]}: an assistant message without a parent_id; remove its tree"
        )
    return path[::-1]


def _is_missing(rank: float | None) -> bool:
    """Whether a rank is null, or NaN, which pandas writes instead."""
    return rank is None or math.isnan(rank)


def _join_replies(path: list[Row], replies: list[Located]) -> Iterator[Located]:
    """The row of the best reply and the worst one; without ranks, a row per reply."""
    prompt = [{"role": ROLES[message["role"]], "content": message["text"]} for message in path]
    ranked = [one for one in replies if not _is_missing(one[1].get("rank"))]
    ranked.sort(key=lambda one: one[1]["rank"])
    for location, reply in ranked[:1] or replies:
        row: Row = {name: reply.get(name) for name in KEPT_COLUMNS}
        row |= {"prompt": prompt, "completion": reply.get("text")}
        if len(ranked) > 1:
            row["rejected_response"] = ranked[-1][1].get("text")
        yield location, row
