"""Conversations as training rows: which tokens are trained on, for the templates of real models."""

import json
import re
from dataclasses import replace
from typing import Any

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
    make_tokenizer,
    read,
)
from refused import refused

from postgrad.data.encode.encoder import EncodedRow, Encoder
from postgrad.data.rows.messages import conversation_of
from postgrad.errors import ConfigError
from postgrad.problem import Conversation, Problem

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello there"}
HI = {"role": "assistant", "content": "Hi!  \n"}
WEATHER = {"role": "user", "content": "What is the weather in Rome?"}
ARGUMENTS = {"city": "Rome"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny"}
SUNNY = {"role": "assistant", "content": "It is sunny."}
TWO_TURNS = (HELLO, HI, WEATHER, SUNNY)
WITH_TOOLS = (HELLO, HI, WEATHER, CALLING, RESULT, SUNNY)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def problem_of(*messages: dict[str, Any], tools: Any = (), num_prompt: int = 0) -> Problem:
    conversation = Conversation(messages, tuple(tools), num_prompt)
    return Problem("u", messages[:-1], "", conversation=conversation)


def encode(
    template: str | None, problem: Problem, train_on: str = "all", **options: Any
) -> tuple[EncodedRow, list[str]]:
    """The row, and the text of each trained run of tokens."""
    prompts = Encoder(make_tokenizer(template), **options)
    row = prompts.conversation(problem, train_on)
    assert len(row.response) == len(row.loss_mask)
    assert row.loss_mask[0] and row.loss_mask[-1]
    texts: list[str] = []
    run: list[int] = []
    for token, is_trained in zip([*row.response, 0], [*row.loss_mask, False], strict=True):
        if is_trained:
            run.append(token)
        elif run:
            texts.append(prompts.decode_raw(run))
            run = []
    return row, texts


JSON_CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (CHATML, TWO_TURNS, ["Hi!  \n<|im_end|>", "It is sunny.<|im_end|>"]),
        (CHATML, (SYSTEM, *TWO_TURNS), ["Hi!  \n<|im_end|>", "It is sunny.<|im_end|>"]),
        (LLAMA3, (SYSTEM, *TWO_TURNS), ["Hi!<|eot_id|>", "It is sunny.<|eot_id|>"]),
        (
            LLAMA3,
            WITH_TOOLS,
            ["Hi!<|eot_id|>", f"{LLAMA_CALL}<|eot_id|>", "It is sunny.<|eot_id|>"],
        ),
        (QWEN25, TWO_TURNS, ["Hi!  \n<|im_end|>", "It is sunny.<|im_end|>"]),
        (
            QWEN25,
            WITH_TOOLS,
            [
                "Hi!  \n<|im_end|>",
                f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>",
                "It is sunny.<|im_end|>",
            ],
        ),
        (GEMMA, TWO_TURNS, ["Hi!<end_of_turn>", "It is sunny.<end_of_turn>"]),
        (MISTRAL, TWO_TURNS, [" Hi!  \n</s>", " It is sunny.</s>"]),
        (PHI3, TWO_TURNS, ["Hi!  \n<|end|>", "It is sunny.<|end|>"]),
        # One token covers the space of the header and the first word: it is trained on.
        (NO_END, TWO_TURNS, ["Hi!", " It is sunny.</s>"]),
    ],
    ids=[
        "chatml",
        "chatml_system",
        "llama",
        "llama_tools",
        "qwen",
        "qwen_tools",
        "gemma",
        "mistral",
        "phi",
        "no_end",
    ],
)
def test_every_assistant_turn_is_trained_on(template: str, messages: Any, trained: list[str]):
    row, texts = encode(template, problem_of(*messages))
    assert texts == trained
    assert not row.is_rewritten
    _, last = encode(template, problem_of(*messages), train_on="last")
    assert last == trained[-1:]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN25, GEMMA, MISTRAL, QWEN3])
def test_row_is_the_full_conversation_tokenized_once(template: str):
    tokenizer = make_tokenizer(template)
    text = tokenizer.apply_chat_template([*TWO_TURNS], tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    row, _ = encode(template, problem_of(*TWO_TURNS))
    ids = [*row.prompt, *row.response]
    assert ids == whole[: len(ids)]
    assert tokenizer.decode(whole[len(ids) :]).strip() == "", "only white space may be left out"


def test_tools_are_rendered_in_the_prompt():
    row, texts = encode(QWEN25, problem_of(*WITH_TOOLS, tools=[TOOL]))
    prompt = make_tokenizer(QWEN25).decode(row.prompt)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in prompt
    assert len(texts) == 3


def test_prompts_of_rl_show_the_tools_of_the_row():
    prompts = Encoder(make_tokenizer(QWEN25))
    text = prompts.text(problem_of(*WITH_TOOLS, tools=[TOOL]))
    assert json.dumps(TOOL) in text and JSON_CALL in text
    assert text.endswith("<|im_start|>assistant\n")


def test_turns_of_the_prompt_column_are_not_trained_on():
    _, texts = encode(CHATML, problem_of(*TWO_TURNS, num_prompt=3))
    assert texts == ["It is sunny.<|im_end|>"]
    row, texts = encode(QWEN25, problem_of(*WITH_TOOLS, num_prompt=3))
    assert [text.startswith("<tool_call>") for text in texts] == [True, False]
    assert "Hi!" in make_tokenizer(QWEN25).decode(row.prompt)


def test_single_demonstration_is_the_conversation_of_prompt_and_reply():
    problem = Problem("u", (HELLO,), "", demonstrations=("Hi!", "another"))
    assert conversation_of(problem) == Conversation(
        (HELLO, {"role": "assistant", "content": "Hi!"}), num_prompt=1
    )
    row, texts = encode(CHATML, problem)
    assert texts == ["Hi!<|im_end|>"]
    assert row.prompt == Encoder(make_tokenizer(CHATML)).prompt(problem)
    assert conversation_of(Problem("u", (HELLO,), "")) is None


# Templates that render earlier turns differently


THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHi!"}
THOUGHT_LAST = {"role": "assistant", "content": "<think>\nRome?\n</think>\n\nIt is sunny."}


def test_thinking_that_the_template_removes_is_not_trained_on():
    problem = problem_of(HELLO, THOUGHT, WEATHER, THOUGHT_LAST)
    row, texts = encode(QWEN3, problem)
    assert texts == ["Hi!<|im_end|>", "<think>\nRome?\n</think>\n\nIt is sunny.<|im_end|>"]
    assert row.is_rewritten
    last, texts = encode(QWEN3, problem, train_on="last")
    assert texts == ["<think>\nRome?\n</think>\n\nIt is sunny.<|im_end|>"]
    assert not last.is_rewritten


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_that_the_template_does_not_read_is_refused(field: str):
    problem = problem_of(HELLO, {**SUNNY, field: "Look."})
    shown = replace(problem, demonstrations=("It is sunny.",))
    for template, style in ((CHATML, "own"), (CHATML, "luffy"), (None, "own")):
        prompts = Encoder(make_tokenizer(template), style=style)
        for call in (prompts.conversation, prompts.demonstrations):
            with pytest.raises(ConfigError, match=f"problem u has {field}"):
                call(shown)
    history = Problem("u", (HELLO, {**SUNNY, field: "Look."}, WEATHER), "")
    for template in (CHATML, None):
        with pytest.raises(ConfigError, match=f"problem u has {field}"):
            Encoder(make_tokenizer(template)).prompt(history)
        # A server answers clients that send earlier thinking back.
        served = Encoder(make_tokenizer(template), checks_messages=False)
        assert "Look." not in served.text(history)


def test_thinking_that_the_template_reads_is_in_every_row():
    problem = problem_of(HELLO, {**SUNNY, "reasoning_content": "Look."})
    _, texts = encode(QWEN3, problem)
    assert texts == ["<think>\nLook.\n</think>\n\nIt is sunny.<|im_end|>"]
    prompts = Encoder(make_tokenizer(QWEN3))
    (ids,) = prompts.demonstrations(replace(problem, demonstrations=("It is sunny.",)))
    assert prompts.decode_raw(ids) == texts[0]


def test_thinking_within_one_tool_loop_is_kept():
    calling = {**CALLING, "content": "<think>\nLook.\n</think>\n\n"}
    row, texts = encode(QWEN3, problem_of(WEATHER, calling, RESULT, THOUGHT_LAST))
    assert texts[0].startswith("<think>\nLook.\n</think>\n\n\n<tool_call>")
    assert texts[1].startswith("<think>\nRome?")
    assert not row.is_rewritten


def test_earlier_tool_calls_are_found_after_thinking_was_removed():
    calling = {**CALLING, "content": "<think>\nLook.\n</think>\n\n"}
    messages = (WEATHER, calling, RESULT, THOUGHT, HELLO, THOUGHT_LAST)
    row, texts = encode(QWEN3, problem_of(*messages))
    assert texts[0].endswith("</tool_call><|im_end|>") and "Look" not in texts[0]
    assert texts[1:] == ["Hi!<|im_end|>", "<think>\nRome?\n</think>\n\nIt is sunny.<|im_end|>"]
    assert row.is_rewritten


def test_without_thinking_the_empty_block_belongs_to_the_prompt():
    options = {"enable_thinking": False}
    row, texts = encode(QWEN3, problem_of(HELLO, HI), options=options)
    assert texts == ["Hi!  \n<|im_end|>"]
    tail = make_tokenizer(QWEN3).decode(row.prompt)
    assert tail.endswith("assistant\n<think>\n\n</think>\n\n")


def test_thinking_of_the_last_turn_is_kept_where_the_template_drops_it():
    row, texts = encode(DEEPSEEK_R1, problem_of(HELLO, THOUGHT, WEATHER, THOUGHT_LAST))
    assert texts == ["\n\nHi!</s>", "Rome?\n</think>\n\nIt is sunny.</s>"]
    text = make_tokenizer(DEEPSEEK_R1).decode([*row.prompt, *row.response])
    assert text.endswith("<|Assistant|><think>\nRome?\n</think>\n\nIt is sunny.</s>")
    assert row.is_rewritten


# The template's own markers


MARKED_CHATML, MARKED_LLAMA3, MARKED_GEMMA = map(
    read, ("marked_chatml", "marked_llama3", "marked_gemma")
)


def without_markers(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


@pytest.mark.parametrize(
    ("marked", "messages"),
    [
        (MARKED_CHATML, TWO_TURNS),
        (MARKED_LLAMA3, TWO_TURNS),
        (MARKED_LLAMA3, WITH_TOOLS),
        (MARKED_GEMMA, TWO_TURNS),
    ],
    ids=["chatml", "llama", "llama_tools", "gemma"],
)
def test_mask_equals_the_generation_markers_of_the_template(marked: str, messages: Any):
    """The same template with and without markers gives the same tokens and the same mask."""
    tokenizer = make_tokenizer(marked)
    encoded = tokenizer.apply_chat_template(
        [*messages], return_dict=True, return_assistant_tokens_mask=True
    )
    located, _ = encode(without_markers(marked), problem_of(*messages))
    mask = [False] * len(located.prompt) + located.loss_mask
    ids = [*located.prompt, *located.response]
    assert ids == encoded["input_ids"][: len(ids)]
    assert mask == [bool(flag) for flag in encoded["assistant_masks"]][: len(ids)]
    assert not any(encoded["assistant_masks"][len(ids) :])
    by_markers, _ = encode(marked, problem_of(*messages))
    assert by_markers == located


def test_markers_decide_where_a_template_has_them():
    """The template's author may leave the end-of-turn token out."""
    marked = MARKED_CHATML.replace(
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    _, texts = encode(marked, problem_of(*TWO_TURNS))
    assert texts == ["Hi!  \n", "It is sunny."]
    _, texts = encode(marked, problem_of(*TWO_TURNS), train_on="last")
    assert texts == ["It is sunny."]


# Styles, plain prompts, limits


def test_style_is_applied_to_a_single_question():
    problem = Problem("u", (HELLO,), "", demonstrations=("Hi!",))
    row, texts = encode(CHATML, problem, style="boxed")
    assert "\\boxed{}" in make_tokenizer(CHATML).decode(row.prompt)
    assert texts == ["Hi!<|im_end|>"]
    with refused("conflict", "data.prompt_style"):
        encode(CHATML, problem_of(*TWO_TURNS), style="boxed")


def test_style_that_opens_the_thought_keeps_the_demonstration_as_it_is():
    problem = Problem("u", (HELLO,), "", demonstrations=("<think>\nHm.</think>Hi!",))
    row, texts = encode(CHATML, problem, style="luffy")
    assert make_tokenizer(CHATML).decode(row.prompt).endswith("assistant\n<think>\n")
    assert texts == ["Hm.</think>Hi!</s>"]


def test_plain_prompts_train_on_the_last_turn_only():
    problem = problem_of(*TWO_TURNS)
    with refused("unsupported", "method.train_on"):
        encode(None, problem)
    row, texts = encode(None, problem, train_on="last")
    assert texts == ["It is sunny.</s>"]
    text = make_tokenizer(None).decode(row.prompt)
    assert text == "Hello there\n\nHi!  \n\n\nWhat is the weather in Rome?"
    with refused("unsupported", "tool_calls"):
        encode(None, problem_of(WEATHER, CALLING, RESULT, SUNNY), train_on="last")


@pytest.mark.parametrize(
    ("template", "problem", "key"),
    [
        (CHATML, problem_of(*WITH_TOOLS), "problem u has tool_calls"),
        (CHATML, problem_of(*TWO_TURNS, tools=[TOOL]), "problem u has tools"),
        (GEMMA, problem_of(SYSTEM, *TWO_TURNS), "problem u: .*System role not supported"),
        (
            LLAMA3,
            problem_of(WEATHER, {**CALLING, "tool_calls": [CALL, CALL]}, RESULT, SUNNY),
            "problem u: .*single tool-calls",
        ),
    ],
)
def test_conversations_that_a_template_cannot_render(template: str, problem: Problem, key: str):
    with pytest.raises(ConfigError, match=key) as caught:
        encode(template, problem)
    assert "\n" not in str(caught.value)


def test_limits_hold_for_the_prompt_and_the_response_of_the_row():
    problem = problem_of(*TWO_TURNS)
    row, _ = encode(CHATML, problem)
    num_prompt, num_response = len(row.prompt), len(row.response)
    fits = Encoder(make_tokenizer(CHATML), max_prompt_tokens=num_prompt)
    assert fits.fit([problem], fits.conversation, num_response) == ([problem], 0)
    with refused("too_large", "rollout.max_response_tokens"):
        fits.fit([problem], fits.conversation, num_response - 1)
    tight = Encoder(make_tokenizer(CHATML), max_prompt_tokens=num_prompt - 1)
    with refused("too_large", "data.max_prompt_tokens"):
        tight.fit([problem], tight.conversation)


def test_prompt_of_a_row_is_truncated():
    problem = problem_of(*TWO_TURNS)
    full, texts = encode(CHATML, problem)
    limit = len(full.prompt) - 2
    row, cut_texts = encode(CHATML, problem, max_prompt_tokens=limit, overlong="left")
    assert row.prompt == full.prompt[2:] and cut_texts == texts
    prompts = Encoder(make_tokenizer(CHATML), max_prompt_tokens=limit, overlong="left")
    assert prompts.fit([problem], prompts.conversation) == ([problem], 1)


def test_a_response_that_goes_on_after_its_end_is_refused():
    end = make_tokenizer(None).eos_token
    ended = {"role": "assistant", "content": f"It is sunny.{end}"}
    _, texts = encode(None, problem_of(WEATHER, ended))
    assert texts == [f"It is sunny.{end}"]
    with refused("wrong_value", "response"):
        encode(None, problem_of(WEATHER, {**ended, "content": f"It is{end} sunny."}))


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("start", ["", "<s>"])
@pytest.mark.parametrize("end", ["", "</s>"])
def test_every_token_of_a_plain_text_is_trained_on(template, start, end):
    """No template; one EOS at the end; the first token, which may be BOS, has nothing before it."""
    text = f"{start}Rome is sunny.{end}"
    problem = Problem("u", (HELLO,), "", conversation=Conversation((), text=text))
    row, trained = encode(template, problem)
    tokenizer = make_tokenizer(template)
    ids = tokenizer(f"{start}Rome is sunny.</s>", add_special_tokens=False)["input_ids"]
    assert [*row.prompt, *row.response] == ids
    assert (row.prompt, row.num_prompt, row.loss_mask) == (ids[:1], 1, [True] * (len(ids) - 1))
    assert trained == [tokenizer.decode(ids[1:])]


MUTE_HI = {**HI, "weight": 0}
MUTE_SUNNY = {**SUNNY, "weight": 0}
GENERATION = read("generation")


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3, GENERATION])
@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize(
    ("messages", "trained"),
    [
        ((HELLO, MUTE_HI, WEATHER, SUNNY), ["It is sunny."]),
        ((HELLO, HI, WEATHER, MUTE_SUNNY), ["Hi!"]),
        ((HELLO, MUTE_HI, WEATHER, SUNNY, HELLO, MUTE_SUNNY), ["It is sunny."]),
    ],
)
def test_messages_of_weight_0_are_not_trained_on(
    template: str, train_on: str, messages: Any, trained: list[str]
):
    row, texts = encode(template, problem_of(*messages), train_on)
    assert len(texts) == len(trained)
    assert all(wanted in text for wanted, text in zip(trained, texts, strict=True))
    assert row.loss_mask == [True] * len(row.response)


def test_turns_of_weight_0_between_trained_ones_are_masked():
    messages = (HELLO, HI, WEATHER, MUTE_SUNNY, HELLO, SUNNY)
    row, texts = encode(CHATML, problem_of(*messages))
    assert texts == ["Hi!  \n<|im_end|>", "It is sunny.<|im_end|>"]
    assert not all(row.loss_mask)


def test_the_last_message_of_weight_1_ends_a_row_without_a_chat_template():
    row, texts = encode(None, problem_of(HELLO, HI, WEATHER, MUTE_SUNNY))
    assert texts == [Encoder(make_tokenizer(None)).decode_raw(row.response)]
    assert texts[0].startswith("Hi!")


def test_a_conversation_of_weight_0_is_no_demonstration():
    assert conversation_of(problem_of(HELLO, MUTE_HI)) is None
    with refused("missing", "response"):
        encode(CHATML, problem_of(HELLO, MUTE_HI))
