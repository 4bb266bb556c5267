"""Chat templates of well-known models, shortened, and a small byte-level tokenizer for them."""

from functools import lru_cache
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast


def read(name: str) -> str:
    """Return a chat template of the folder chat_templates."""
    return (Path(__file__).with_suffix("") / f"{name}.jinja").read_text()


CHATML = read("chatml")

# Qwen2.5: a default system message, tools in it, tool calls as JSON, tool results as user turns.
QWEN25 = read("qwen25")

# Qwen3: turns before the last user message lose their thinking; later ones always have a block.
QWEN3 = read("qwen3")

# Llama 3.1: one tool call per message, whose content it ignores; tool results are from ipython.
LLAMA3 = read("llama3")

# Gemma: alternating roles only, the assistant is called model, no system message.
GEMMA = read("gemma")

# Mistral: no header for the assistant, and EOS ends its turns.
MISTRAL = read("mistral")

# DeepSeek-R1: drops the thinking of every turn, and opens it in the generation prompt.
DEEPSEEK_R1 = read("deepseek_r1")

# Phi-3: each turn ends with <|end|>, a conversation with EOS.
PHI3 = read("phi3")

# A template that writes no token after a turn.
NO_END = read("no_end")

SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
CORPUS = [
    "user assistant system model tool ipython You are a helpful assistant.",
    "\n\n\n<think>\n\n</think>\n\n It is sunny. Hello there, what is the weather in Rome?",
    '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
] * 4


@lru_cache
def make_backend() -> str:
    """A byte-level BPE tokenizer with a few hundred merges, as JSON."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", *SPECIAL_TOKENS],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def make_sentencepiece_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token per character, and a space before each text, as in Llama 2's tokenizer.json."""
    characters = ["\u2581", "\n", *map(chr, range(33, 127))]
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *characters]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(make_backend()), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
