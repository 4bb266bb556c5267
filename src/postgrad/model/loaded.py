"""The pair that loading returns and saving takes: a model and its tokenizer."""

from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """A transformers causal language model and its tokenizer."""

    model: Any
    tokenizer: Any
