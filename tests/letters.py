"""A tokenizer of characters with a BOS, and small random GPT-2 models for it: for the tests of the toolkit."""

import string

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, with a BOS in front of every text."""
    words = {word: i for i, word in enumerate([*string.printable, "<s>", "</s>"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words["<s>"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def gpt2(seed: int, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    size = len(tokenizer)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_positions=400, n_embd=16, n_layer=1, n_head=2, **ends)
    )
    for (
        p
    ) in model.parameters():  # GPT-2 starts near the uniform distribution; tests should see a shape
        p.data.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return model.eval()
