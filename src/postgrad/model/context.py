"""The context length of a model, from its configuration."""

from typing import Any

# Names of the longest row in tokens. Most families have the first one.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
NO_LIMIT = 1 << 20  # tokens; recurrent models and those with ALiBi accept rows of any length


def context_length(config: Any) -> int:
    """Return the most tokens of a row, prompt and response together.

    Args:
        config: a transformers configuration; of a model with several parts, the text model's
            counts.
    """
    text_config = config.get_text_config()
    for name in NAMES:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT
