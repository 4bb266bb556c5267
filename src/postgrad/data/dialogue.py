"""Reads HH-RLHF transcripts, "\\n\\nHuman: ...\\n\\nAssistant: ...", as messages.

Two transcripts that differ in the last reply become one dialogue and two replies.
"""

from postgrad.data.rows import RowError, checked_text
from postgrad.data.styles import Messages

SPEAKERS = (("user", "\n\nHuman:"), ("assistant", "\n\nAssistant:"))


def read_transcript(value: object, name: str) -> Messages:
    """The turns of a transcript.

    The two speakers alternate, so "Human:" inside a human turn does not start a new turn.

    Raises:
        RowError: the transcript does not start with a human turn, or a turn is empty.
    """
    rest = checked_text(value, name)
    first_mark = SPEAKERS[0][1]
    if not rest.startswith(first_mark):
        raise RowError(
            f"{name} is no transcript, which starts with two newlines and Human:; "
            "give the question in a column prompt"
        )
    rest = rest.removeprefix(first_mark)
    messages: list[dict[str, str]] = []
    while True:
        role = SPEAKERS[len(messages) % 2][0]
        next_mark = SPEAKERS[(len(messages) + 1) % 2][1]
        turn, separator, rest = rest.partition(next_mark)
        if not turn.strip():
            raise RowError(f"{name} has an empty turn (number {len(messages) + 1}, {role})")
        messages.append({"role": role, "content": turn.strip()})
        if not separator:
            return tuple(messages)


def read_pair(chosen: object, rejected: object) -> tuple[Messages, str, str]:
    """(messages that both share, chosen reply, rejected reply).

    Raises:
        RowError: a transcript does not end in a reply, or the two differ before the last reply.
    """
    chosen_turns = read_transcript(chosen, "chosen")
    rejected_turns = read_transcript(rejected, "rejected")
    for name, turns in (("chosen", chosen_turns), ("rejected", rejected_turns)):
        if turns[-1]["role"] != "assistant":
            raise RowError(f"{name} does not end in a reply of the assistant")
    if chosen_turns[:-1] != rejected_turns[:-1]:
        raise RowError("chosen and rejected differ before the last reply")
    return chosen_turns[:-1], chosen_turns[-1]["content"], rejected_turns[-1]["content"]
