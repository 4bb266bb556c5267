"""The context length and the vocabulary of a model, from its configuration."""

from typing import Any

from postgrad.errors import RunError

# Names of the longest row in tokens. Most families have the first one.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
# Rotary positions whose angles change for all tokens of a pass once one row exceeds a length.
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")
# Numbers of keys that a token attends to at most, chosen by the model among all before it. Beyond
# them even the stock decode of transformers differs from its own pass over the whole row.
CHOSEN_KEYS = ("index_topk", "keep_window_size")
NO_LIMIT = 1 << 20  # tokens; recurrent models and those with ALiBi accept rows of any length


def context_length(config: Any) -> int:
    """Return the most tokens of a row, prompt and response together.

    Where rotary positions depend on the length of a pass (Phi-3 with 128k tokens), it is the
    length up to which they do not: a short row beside a long one would get other numbers. Where
    the model chooses the keys of a token (DeepSeek-V3.2), it is the length up to which all count.

    Args:
        config: a transformers configuration; of a model with several parts, the text model's
            counts.
    """
    text_config = config.get_text_config()
    for name in NAMES:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return min(value, _fixed_rotary_length(text_config), _all_keys_length(text_config))
    return _all_keys_length(text_config)


def _fixed_rotary_length(text_config: Any) -> int:
    """Return the longest row whose rotary positions do not depend on its length."""
    rotary = getattr(text_config, "rope_parameters", None) or {}
    if rotary.get("rope_type") not in LENGTH_DEPENDENT_ROTARY:
        return NO_LIMIT
    name = "original_max_position_embeddings"
    length = rotary.get(name) or getattr(text_config, name, None)
    return length if isinstance(length, int) and length > 0 else NO_LIMIT


def _all_keys_length(text_config: Any) -> int:
    """Return the longest row whose tokens attend to all tokens before them."""
    counts = [getattr(text_config, name, None) for name in CHOSEN_KEYS]
    return min([count for count in counts if isinstance(count, int) and count > 0] or [NO_LIMIT])


def check_token_id(largest: int, config: Any) -> None:
    """Raise RunError if the largest token id of some texts has no embedding in the model.

    Such tokens were added to the tokenizer alone. On a GPU the pass would end the process.
    """
    vocabulary = int(config.get_text_config().vocab_size)
    if largest >= vocabulary:
        raise RunError(
            f"the tokenizer gives the token {largest}, but the model's vocabulary has "
            f"{vocabulary} tokens (vocab_size); resize the model's embeddings to the tokenizer "
            "and save it, or use the tokenizer that belongs to it"
        )
