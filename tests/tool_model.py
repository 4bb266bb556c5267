"""A tiny chat model that can call a tool with one token, and what the tests of tools share."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<unk>"
# As Qwen2.5 does it: schemas in the system turn, tools' answers together in one user turn.
KNOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT_CHAT = "{{ tools | length }}" + PLAIN_CHAT  # a template that knows of tools and says little


def chat_tokenizer(characters: str, template: str) -> Any:
    """A token a character; the turn marks and the call are one token each."""
    tokens = [*characters, UNKNOWN, START, END, CALL]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    tokenizer.add_tokens([CALL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def chat_model(folder: Path, template: str = KNOWS_TOOLS) -> Path:
    """Random weights, and tokens for digits alone beside the marks."""
    tokenizer = chat_tokenizer("0123456789+=\n", template)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TOOLS = '''
import time

CALLS = []

def look(state: dict = None, problem=None) -> str:
    """Look at the answer.

    Args:
        state: what it remembers
    """
    state["times"] = state.get("times", 0) + 1
    return f"{problem.ground_truth}{state['times']}"

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b

def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "awake"

def leave() -> str:
    """End everything."""
    raise SystemExit("gone")

def bare(x):
    return x

def long() -> str:
    """Say a lot."""
    return "a" * 500 + "b" * 500
'''
