"""Uids of problems: the data's own `uid` column, or a hash of the problem's content."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from postgrad.errors import Conflict
from postgrad.pictures import Picture
from postgrad.problem import Problem


def content_uid(
    data_source: str,
    messages: Sequence[dict[str, Any]],
    ground_truth: str,
    images: Sequence[Picture] = (),
) -> str:
    """16 hex digits of a hash of the content.

    The uid is the same in every process, every Python version and every row order.
    """
    content: list[Any] = [data_source, list(messages), ground_truth]
    if images:
        content.append([picture.key for picture in images])
    canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=8).hexdigest()


def assign_uids(problems: Sequence[Problem], locations: Sequence[str]) -> list[Problem]:
    """Give each problem without a uid its content uid; repeated problems get `-2`, `-3`, ...

    Args:
        problems: problems that have a uid keep it.
        locations: where each problem was read ("train.jsonl: line 3"), for the error message.

    Raises:
        ConfigError: two problems came with the same uid.
    """
    owners: dict[str, str] = {}  # uid -> location of the problem that has it
    for problem, location in zip(problems, locations, strict=True):
        if not problem.uid:
            continue
        if problem.uid in owners:
            raise Conflict(
                f"{location}: uid {problem.uid!r} is already that of {owners[problem.uid]}; "
                "make the column uid unique, or remove it and uids are made from the content",
                at="uid",
            )
        owners[problem.uid] = location

    with_uids: list[Problem] = []
    copies: dict[str, int] = {}
    for problem, location in zip(problems, locations, strict=True):
        if not problem.uid:
            base = content_uid(
                problem.data_source, problem.messages, problem.ground_truth, problem.images
            )
            uid = base
            while uid in owners:
                copies[base] = copies.get(base, 1) + 1
                uid = f"{base}-{copies[base]}"
            owners[uid] = location
            problem = replace(problem, uid=uid)
        with_uids.append(problem)
    return with_uids
