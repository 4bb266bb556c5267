"""Responses that the data give (pairs, labels, demonstrations) as tokens after the prompt."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chat_templates import (
    CHATML,
    DEEPSEEK_R1,
    GEMMA,
    LLAMA3,
    MISTRAL,
    NO_END,
    PHI3,
    QWEN3,
    QWEN25,
    make_sentencepiece_tokenizer,
    make_tokenizer,
)
from refused import refused

from postgrad.data.encode.encoder import Encoder
from postgrad.methods.support.pairs import pair_rows
from postgrad.problem import Problem

HELLO = {"role": "user", "content": "Hello there"}
HI = {"role": "assistant", "content": "Hi!"}
WEATHER = {"role": "user", "content": "What is the weather in Rome?"}


def pair(chosen: str, rejected: str = "no", *messages: dict[str, Any]) -> Problem:
    return Problem("u", messages or (HELLO,), "", extra={"chosen": chosen, "rejected": rejected})


def rows_of(prompts: Encoder, problem: Problem) -> Any:
    """The rows of DPO, ORPO, SimPO and KTO."""
    config = SimpleNamespace(rollout=SimpleNamespace(max_response_tokens=1000))
    method = SimpleNamespace(ports=SimpleNamespace(encoder=prompts), config=config)
    return pair_rows(cast(Any, method), problem)


ENDS = [
    (CHATML, "It is sunny.<|im_end|>"),
    (QWEN25, "It is sunny.<|im_end|>"),
    (QWEN3, "<think>\n\n</think>\n\nIt is sunny.<|im_end|>"),
    (LLAMA3, "It is sunny.<|eot_id|>"),
    (GEMMA, "It is sunny.<end_of_turn>"),
    (MISTRAL, " It is sunny.</s>"),
    (PHI3, "It is sunny.<|end|>"),
    (NO_END, "It is sunny.</s>"),
    (None, "It is sunny.</s>"),
]


@pytest.mark.parametrize(("template", "written"), ENDS)
def test_pairs_and_demonstrations_are_what_the_template_writes(template: str | None, written: str):
    tokenizer = make_tokenizer(template)
    prompts = Encoder(tokenizer)
    problem = pair("It is sunny.", "no", HELLO, HI, WEATHER)
    chosen, rejected = rows_of(prompts, problem)
    assert chosen.prompt == rejected.prompt == prompts.prompt(problem)
    assert tokenizer.decode(chosen.response) == written
    assert tokenizer.decode(rejected.response) == written.replace("It is sunny.", "no")
    shown = Problem("d", problem.messages, "", demonstrations=("It is sunny.",))
    assert prompts.demonstrations(shown) == [chosen.response]


@pytest.mark.parametrize("template", [template for template, _ in ENDS])
def test_rows_of_pairs_have_the_text_of_sft(template: str | None):
    prompts = Encoder(make_tokenizer(template))
    problem = Problem("u", (HELLO,), "", demonstrations=("It is sunny.",))
    row = prompts.conversation(problem)
    ids = [*prompts.prompt(problem), *prompts.reply(problem, "It is sunny.")]
    assert prompts.decode_raw([*row.prompt, *row.response]) == prompts.decode_raw(ids)


@pytest.mark.parametrize("template", [CHATML, GEMMA, PHI3])
def test_a_response_that_brings_its_end_has_one(template: str):
    prompts = Encoder(make_tokenizer(template))
    once = prompts.reply(pair(""), "Hi!")
    end = prompts.decode_raw(once[-1:])
    assert prompts.reply(pair(""), f"Hi!{end}") == once


def test_thinking_of_a_pair_is_rendered_by_the_template():
    prompts = Encoder(make_tokenizer(QWEN3))
    ids = prompts.reply(pair(""), "<think>Hm.</think>Hi!")
    assert prompts.decode_raw(ids) == "<think>\nHm.\n</think>\n\nHi!<|im_end|>"


# Tokenizers that start each text with a space


@pytest.mark.parametrize("prompt", ["2+2=", "2+2=\n", "2+2= "])
@pytest.mark.parametrize("response", ["4", " 4", "\n4"])
def test_a_response_has_no_space_of_the_tokenizer(prompt: str, response: str):
    tokenizer = make_sentencepiece_tokenizer(None)
    prompts = Encoder(tokenizer)
    problem = Problem("u", ({"role": "user", "content": prompt},), "", demonstrations=(response,))
    row = prompts.conversation(problem)
    assert row.prompt == tokenizer(prompt)["input_ids"]
    pieces = [*response.replace(" ", "\u2581"), "</s>"]
    assert tokenizer.convert_ids_to_tokens(row.response) == pieces
    assert prompts.reply(problem, response) == row.response
    assert prompts.demonstrations(problem) == [row.response]


def test_a_token_over_the_border_leaves_the_prompt_as_it_is():
    """Two line breaks are one token here, but the prompt ends between them."""
    tokenizer = make_tokenizer(None)
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    prompts = Encoder(tokenizer)
    problem = Problem("u", ({"role": "user", "content": "Hello\n"},), "", demonstrations=("\nHi",))
    row = prompts.conversation(problem)
    assert row.prompt == tokenizer("Hello\n")["input_ids"]
    assert row.response == [*tokenizer("\nHi")["input_ids"], tokenizer.eos_token_id]


# Prompts that open the thought


@pytest.mark.parametrize("start", ["<think>\n", "<think>", "\n<think>\n", ""])
def test_one_opening_of_the_thought_in_every_method(start: str):
    response = f"{start}Hm.</think>Hi!"
    for style in ("own", "luffy"):
        tokenizer = make_tokenizer(DEEPSEEK_R1)
        prompts = Encoder(tokenizer, style=style)
        problem = Problem("u", (HELLO,), "", demonstrations=(response,))
        assert prompts.text(problem).endswith("<|Assistant|><think>\n")
        chosen, _ = rows_of(prompts, pair(response))
        (demonstration,) = prompts.demonstrations(problem)
        for ids in (chosen.response, demonstration, prompts.conversation(problem).response):
            assert tokenizer.decode(ids) == "Hm.</think>Hi!</s>"


# Prompts that end in an assistant message


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3])
def test_a_prompt_that_ends_in_an_assistant_message_is_refused(template: str):
    messages = (HELLO, {"role": "assistant", "content": "Sure,"})
    prompts = Encoder(make_tokenizer(template))
    key = "problem u: its prompt ends in an assistant message"
    problem = Problem("u", messages, "", demonstrations=("it is sunny.",))
    with refused("unsupported", "messages", shows=key):
        prompts.prompt(problem)
    with refused("unsupported", "messages", shows=key):
        prompts.conversation(problem)
    with refused("unsupported", "messages", shows=key):
        rows_of(prompts, pair("yes", "no", *messages))


def test_a_plain_prompt_is_continued():
    messages = (HELLO, {"role": "assistant", "content": "Sure,"})
    problem = Problem("u", messages, "")
    assert Encoder(make_tokenizer(None)).text(problem) == "Hello there\n\nSure,"
