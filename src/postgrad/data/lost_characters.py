"""Letters and digits of prompts that a tokenizer does not know."""

import unicodedata
from collections.abc import Sequence
from itertools import islice
from typing import Any

from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.problem import Problem

NUM_LOOKED_AT = 32  # prompts
NUM_SHOWN = 5  # characters


def describe_lost_characters(prompts: Prompts, problems: Sequence[Problem]) -> str:
    """Return a line about letters and digits that the tokens of the first prompts lack, or ""."""
    with_prompt = (p for p in problems if p.conversation is None or not p.conversation.text)
    looked_at = list(islice(with_prompt, NUM_LOOKED_AT))
    lost: dict[str, None] = {}
    num_with_loss = 0
    for problem in looked_at:
        try:
            text = prompts.text(problem)
        except ConfigError:  # a conversation that has no prompt of its own
            continue
        unknown = _unknown_ids(prompts.tokenizer, text)
        ids = [token for token in prompts.encode_plain(text) if token not in unknown]
        here = lost_characters(text, prompts.decode_raw(ids))
        num_with_loss += bool(here)
        lost |= dict.fromkeys(here)
    if not lost:
        return ""
    shown = " ".join(list(lost)[:NUM_SHOWN]) + (" ..." if len(lost) > NUM_SHOWN else "")
    return (
        f"warning: the tokenizer does not know {len(lost)} letters or digits ({shown}) in "
        f"{num_with_loss} of the first {len(looked_at)} prompts; the model does not see them"
    )


def _unknown_ids(tokenizer: Any, text: str) -> set[int | None]:
    """Return the ids that stand for what the tokenizer does not know: those of unk and padding.

    A token that the text itself has stands for itself: a ChatML model may pad with <|im_end|>.
    """
    tokens = {
        tokenizer.unk_token: tokenizer.unk_token_id,
        tokenizer.pad_token: tokenizer.pad_token_id,
    }
    return {number for token, number in tokens.items() if token and token not in text}


def lost_characters(text: str, decoded: str) -> list[str]:
    """Return the letters and digits of a text that its decoded tokens lack, whatever their case."""
    kept = set(_normalized(decoded))
    return [
        character
        for character in dict.fromkeys(text)
        if character.isalnum() and not kept.issuperset(_normalized(character))
    ]


def _normalized(text: str) -> str:
    """Without case, marks and other forms of a letter, which tokenizers may remove."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))
