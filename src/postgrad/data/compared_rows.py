"""Converters of rows with two replies and a verdict on them, one per schema of schemas.py.

HelpSteer, PKU-SafeRLHF, WebGPT and the Chatbot Arena each name the better reply in their own way.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from postgrad.data.messages import read_messages
from postgrad.data.preference_rows import read_dialogue_pair, read_pair_of
from postgrad.data.rows import Row, RowError
from postgrad.problem import Problem

DROP_ADVICE = "remove the row, or drop all such rows with postgrad data prepare own"


@dataclass(frozen=True)
class Comparison:
    """Columns of two replies to a prompt.

    Attributes:
        name: for error messages.
        prompt: column of the prompt; "" where each reply is a whole dialogue.
        replies: columns of the first and the second reply.
        verdict: columns that say which one is better.
        better: from the values of `verdict`, the index of the better reply; None if none is.
    """

    name: str
    prompt: str
    replies: tuple[str, str]
    verdict: tuple[str, ...]
    better: Callable[..., int | None]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of such a row."""
        return tuple(filter(None, (self.prompt, *self.replies, *self.verdict)))

    def read(self, row: Row, stem: str) -> Problem:
        """The problem of a row. Raises RowError if neither reply is better."""
        names = " and ".join(self.verdict)
        try:
            better = self.better(*(row.get(name) for name in self.verdict))
        except (TypeError, ValueError) as error:
            raise RowError(f"{names}: not a known value; {DROP_ADVICE}") from error
        if better is None:  # the reason has no values: `prepare` counts the rows of each reason
            raise RowError(f"{names}: neither reply is better; {DROP_ADVICE}")
        row = self._with_only_turns(row)
        pair = {
            "chosen": row.get(self.replies[better]),
            "rejected": row.get(self.replies[1 - better]),
        }
        used = {name for name in self.columns if name != self.prompt}
        row = {name: value for name, value in row.items() if name not in used} | pair
        if not self.prompt:
            return read_dialogue_pair(row, stem)
        prompt = row.get(self.prompt)
        if isinstance(prompt, dict):  # WebGPT's question
            prompt = prompt.get("full_text")
        messages = read_messages({self.prompt: prompt}, self.prompt)
        return read_pair_of(row, stem, messages, used=(self.prompt,))

    def _with_only_turns(self, row: Row) -> Row:
        """The row with texts for the prompt and the replies, if each is a JSON list of one text.

        Raises RowError if they are lists of several turns, in which each reply has its own.
        """
        names = tuple(filter(None, (self.prompt, *self.replies)))
        turns = {name: turns_of(row.get(name)) for name in names}
        if not all(turns.values()):
            return row
        if any(len(texts) > 1 for texts in turns.values()):
            raise RowError(
                f"{' and '.join(self.replies)} have several turns, so they differ before the last "
                f"reply; {DROP_ADVICE}"
            )
        return row | {name: texts[0] for name, texts in turns.items()}


def turns_of(value: Any) -> list[Any]:
    """The turns in a text that is a JSON list (lmsys-arena-human-preference-55k); [] for others."""
    if not isinstance(value, str) or not value.startswith("["):
        return []
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(turns, list) and all(isinstance(turn, str | None) for turn in turns)
    return turns if is_list else []


def _by_sign(strength: Any) -> int | None:
    """HelpSteer: below 0 if the first reply is better, above 0 if the second one is."""
    strength = float(strength)
    if math.isnan(strength):
        raise ValueError("not a number")
    return int(strength > 0) if strength else None


def _by_index(index: Any) -> int | None:
    """PKU-SafeRLHF: the index of the better reply."""
    if isinstance(index, bool) or int(index) not in (0, 1):
        raise ValueError("no index")
    return int(index)


def _by_scores(first: Any, second: Any) -> int | None:
    return _by_sign(float(second) - float(first))


def _by_flags(first: Any, second: Any) -> int | None:
    """Chatbot Arena's 55k: 1 in the column of the better reply; 0 in both is a tie."""
    return {(1, 0): 0, (0, 1): 1}.get((int(first), int(second)))


def _by_winner(winner: Any) -> int | None:
    """Chatbot Arena: model_a or model_b; others are ties."""
    return {"model_a": 0, "model_b": 1}.get(winner)


COMPARISONS = (
    Comparison(
        "HelpSteer2", "prompt", ("response_1", "response_2"), ("preference_strength",), _by_sign
    ),
    Comparison(
        "HelpSteer3", "context", ("response1", "response2"), ("overall_preference",), _by_sign
    ),
    Comparison(
        "PKU-SafeRLHF", "prompt", ("response_0", "response_1"), ("better_response_id",), _by_index
    ),
    Comparison("WebGPT", "question", ("answer_0", "answer_1"), ("score_0", "score_1"), _by_scores),
    Comparison("Chatbot Arena", "", ("conversation_a", "conversation_b"), ("winner",), _by_winner),
    Comparison(
        "Chatbot Arena's 55k",
        "prompt",
        ("response_a", "response_b"),
        ("winner_model_a", "winner_model_b"),
        _by_flags,
    ),
    Comparison(
        "replies of the Arena", "prompt", ("response_a", "response_b"), ("winner",), _by_winner
    ),
)
