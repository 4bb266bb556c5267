"""Reads HH-RLHF transcripts, "\\n\\nHuman: ...\\n\\nAssistant: ...", as messages.

Two transcripts that differ in the last reply become one dialogue and two replies.
"""

from postgrad.data.encode.styles import Messages
from postgrad.data.rows.values import RowError, checked_text

HUMAN_MARK = "\n\nHuman:"
REPLY_MARK = "\n\nAssistant:"
SPEAKERS = (("user", HUMAN_MARK), ("assistant", REPLY_MARK))
# Some rows of HH-RLHF itself are damaged.
ADVICE = "remove the row, or drop all such rows with postgrad data prepare own"


def is_transcript(value: object) -> bool:
    """Whether a value is a text that starts with a human turn."""
    return isinstance(value, str) and value.lstrip().startswith(HUMAN_MARK.strip())


def read_transcript(value: object, name: str) -> Messages:
    """Return the turns of a transcript.

    The two speakers alternate, so "Human:" inside a human turn does not start a new turn.

    Raises:
        RowError: the transcript does not start with a human turn, or a turn is empty.
    """
    rest = checked_text(value, name).replace("\r\n", "\n")
    if not is_transcript(rest):
        raise RowError(
            f"{name} is no transcript, which starts with Human:; "
            "give the question in a column prompt"
        )
    rest = rest.lstrip().removeprefix(HUMAN_MARK.strip())
    messages: list[dict[str, str]] = []
    while True:
        role = SPEAKERS[len(messages) % 2][0]
        next_mark = SPEAKERS[(len(messages) + 1) % 2][1]
        turn, separator, rest = rest.partition(next_mark)
        if not turn.strip():
            number = len(messages) + 1
            raise RowError(f"{name} has an empty turn (number {number}, {role}); {ADVICE}")
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
            raise RowError(f"{name} does not end in a reply of the assistant; {ADVICE}")
    if chosen_turns[:-1] != rejected_turns[:-1]:
        raise RowError(f"chosen and rejected differ before the last reply; {ADVICE}")
    return chosen_turns[:-1], chosen_turns[-1]["content"], rejected_turns[-1]["content"]
