"""Stop strings: where in a row of tokens one is complete. Only the tail is decoded, and no token is made or changed."""

from collections.abc import Sequence
from typing import Any

from postgrad.rollout.engine import Completion

SLACK = 4  # tokens decoded beyond the longest string's bytes: a first token may lose its space or be half a character


class StopStrings:
    """Finds the token that completes one of some strings. Special tokens count as the text that names them."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.reach = (
            max(len(string.encode()) for string in strings) + SLACK
        )  # a token is at least a byte

    def end(self, tokens: Sequence[int], seen: int) -> int:
        """How many of the tokens there are when the first string is complete, or 0; up to `seen` there was none."""
        start = max(0, seen - self.reach)
        if not self._has(tokens[start:]):
            return 0
        return next(
            (n for n in range(seen + 1, len(tokens)) if self._has(tokens[start:n])), len(tokens)
        )

    def cut(self, done: Completion) -> Completion:
        """A completion as far as the first string in it: for engines that cannot end a row there by themselves."""
        end = self.end(done.tokens, 0)
        return Completion(done.tokens[:end], done.logprobs[:end], "stop") if end else done

    def _has(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)
