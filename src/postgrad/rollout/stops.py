"""Stop strings and ids: finds the token that ends a row. Only the end of a row is decoded."""

from collections.abc import Sequence
from typing import Any

from postgrad.rollout.engine import Completion, Sampling

# Tokens decoded beyond the longest string's bytes: the first decoded token may lose its leading
# space or be part of a character.
MARGIN = 4


class StopStrings:
    """Finds the token that completes one of `strings` or is one of `ids`.

    Special tokens count as the text that names them.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.ids = frozenset(ids)
        # A token has at least one byte, so this many tokens hold the longest string.
        self.window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def find_end(self, tokens: Sequence[int], num_checked: int) -> int:
        """Return the number of tokens up to the first stop string or id; 0 if there is none.

        The first `num_checked` tokens are known to complete no stop string and to be no stop id.
        """
        for position in range(num_checked, len(tokens) if self.ids else 0):
            if tokens[position] in self.ids:
                return self._find_string_end(tokens[:position], num_checked) or position + 1
        return self._find_string_end(tokens, num_checked)

    def _find_string_end(self, tokens: Sequence[int], num_checked: int) -> int:
        if not self.strings:
            return 0
        start = max(0, num_checked - self.window)
        if not self._contains_stop(tokens[start:]):
            return 0
        for end in range(num_checked + 1, len(tokens)):
            if self._contains_stop(tokens[start:end]):
                return end
        return len(tokens)

    def cut(self, completion: Completion) -> Completion:
        """Cut a completion after its first stop string, for engines that cannot stop there."""
        end = self.find_end(completion.tokens, 0)
        return completion.cut(end) if end else completion

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)


def make_stops(tokenizer: Any, sampling: Sampling) -> StopStrings | None:
    """Return what finds the stop strings and ids of the sampling; None if it has neither."""
    if not sampling.stop and not sampling.stop_ids:
        return None
    return StopStrings(tokenizer, sampling.stop, sampling.stop_ids)
