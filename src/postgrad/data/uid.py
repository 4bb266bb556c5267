"""The name a problem keeps: from the data's own `uid` column, or a hash of what the problem says."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from postgrad.errors import ConfigError
from postgrad.problem import Problem


def content_uid(data_source: str, messages: Sequence[dict[str, str]], ground_truth: str) -> str:
    """16 hex digits from what the problem says; the same in every process, Python version and row order."""
    content = [data_source, list(messages), ground_truth]
    canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=8).hexdigest()


def assign_uids(problems: Sequence[Problem], places: Sequence[str]) -> list[Problem]:
    """Give each problem whose `uid` is empty its content uid; a repeated problem gets `-2`, `-3` ... in order.

    Args:
        problems: those with a uid keep it.
        places: where each problem was read ("file: row 3"), for the message.

    Raises:
        ConfigError: two problems came with the same uid.
    """
    seen: dict[str, str] = {}
    for problem, place in zip(problems, places, strict=True):
        if problem.uid and problem.uid in seen:
            raise ConfigError(
                f"{place}: uid {problem.uid!r} is already that of {seen[problem.uid]}; make the column uid unique, "
                "or remove it and uids are made from the content"
            )
        if problem.uid:
            seen[problem.uid] = place

    named: list[Problem] = []
    copies: dict[str, int] = {}
    for problem, place in zip(problems, places, strict=True):
        if not problem.uid:
            base = uid = content_uid(problem.data_source, problem.messages, problem.ground_truth)
            while uid in seen:
                copies[base] = copies.get(base, 1) + 1
                uid = f"{base}-{copies[base]}"
            seen[uid] = place
            problem = replace(problem, uid=uid)
        named.append(problem)
    return named
