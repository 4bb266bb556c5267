"""HH-RLHF's transcripts: "\\n\\nHuman: ...\\n\\nAssistant: ..." as messages, and a pair of them as a question and two replies."""

from postgrad.data.rows import RowError, checked_text
from postgrad.data.styles import Messages

MARKS = (("user", "\n\nHuman:"), ("assistant", "\n\nAssistant:"))


def read_transcript(value: object, name: str) -> Messages:
    """The turns of a transcript. Speakers take turns, so "Human:" in the human's own words opens no new turn.

    Raises:
        RowError: it does not start with a human turn, or a turn is empty.
    """
    rest = checked_text(value, name)
    if not rest.startswith(MARKS[0][1]):
        raise RowError(f"{name} is no transcript; it must start with two newlines and Human:")
    rest = rest.removeprefix(MARKS[0][1])
    messages: list[dict[str, str]] = []
    while True:
        role = MARKS[len(messages) % 2][0]
        mark = MARKS[(len(messages) + 1) % 2][1]
        turn, found, rest = rest.partition(mark)
        if not turn.strip():
            raise RowError(f"{name} has an empty turn (number {len(messages) + 1}, {role})")
        messages.append({"role": role, "content": turn.strip()})
        if not found:
            return tuple(messages)


def read_pair(chosen: object, rejected: object) -> tuple[Messages, str, str]:
    """(the dialogue that both share, the chosen reply, the rejected reply).

    Raises:
        RowError: a transcript does not end in a reply, or the two differ before it.
    """
    sides = read_transcript(chosen, "chosen"), read_transcript(rejected, "rejected")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if side[-1]["role"] != "assistant":
            raise RowError(f"{name} does not end in a reply of the assistant")
    if sides[0][:-1] != sides[1][:-1]:
        raise RowError("chosen and rejected differ before the last reply")
    return sides[0][:-1], sides[0][-1]["content"], sides[1][-1]["content"]
