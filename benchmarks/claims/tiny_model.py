"""A chat model with random weights and one token per character, for smoke tests on a CPU."""

import string
from pathlib import Path


def make_tiny_model(folder: Path) -> Path:
    """Write a chat model with random weights and one token per character."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<|im_end|>", "<unk>", *string.printable]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=words[0], pad_token="<unk>", unk_token="<unk>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = Qwen2Config(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,  # type: ignore[arg-type]
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
