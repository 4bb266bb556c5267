"""A character tokenizer with a BOS token, and small random GPT-2 models for it."""

import string

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character and a BOS before every text."""
    vocabulary = {token: i for i, token in enumerate([*string.printable, "<s>", "</s>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def gpt2(seed: int, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    size = len(tokenizer)
    end_ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_positions=400, n_embd=16, n_layer=1, n_head=2, **end_ids)
    )
    # GPT-2's initial distribution is almost uniform; the tests need one that is not.
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.add_(0.3 * noise)
    return model.eval()
