"""Prompt styles: the exact text of each, replacing one by another, the same bytes everywhere."""

import pytest
from chat_templates import read
from refused import refused
from tables import table, tabled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postgrad.config.schema import DataConfig
from postgrad.data.encode.encoder import Encoder, make_encoder
from postgrad.data.encode.styles import BOXED, STYLES, TWO_SECTIONS, find_style, question_of, styled
from postgrad.problem import Problem

QUESTION = "What is {x} if $x^{2}=4$?"
USER = ({"role": "user", "content": QUESTION},)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
# ChatML with Qwen3's option: without thinking the prompt has an empty think block.
QWEN3 = read("empty_think")
OPENS_THINK = QWEN3.replace("assistant\n{%", "assistant\n<think>\n{%")


def qwen(template: str | None = QWEN3) -> PreTrainedTokenizerFast:
    vocabulary = {
        token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n", "?"])
    }
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[2], additional_special_tokens=SPECIAL[:2]
    )
    made.chat_template = template
    return made


def problem(*messages: dict[str, str]) -> Problem:
    return Problem("u", messages or USER, "2")


def rendered(
    style: str, template: str | None = QWEN3, *messages: dict[str, str], **options: object
) -> str:
    """The prompt as text; asserts that its ids decode to the same text."""
    prompts = Encoder(qwen(template), style=style, options=options)
    text = prompts.text(problem(*messages))
    decoded = prompts.tokenizer.decode(
        prompts.prompt(problem(*messages)), skip_special_tokens=False
    )
    assert decoded == text
    return text


GOLDEN: dict[str, str] = dict(table(__file__, "golden"))


@pytest.mark.parametrize("style", GOLDEN)
def test_golden_text(style: str):
    assert rendered(style) == GOLDEN[style]


def test_zero_shot_puts_the_query_in_backticks_and_opens_the_answer():
    text = rendered("zero_shot")
    assert text.endswith(f"\n\n# Query:\n```{QUESTION}```\n\n# Answer:\n```")
    assert set(STYLES) == {*GOLDEN, "zero_shot"}


def test_boxed_request_is_that_of_the_papers():
    assert BOXED == "Please reason step by step, and put your final answer within \\boxed{}."


def test_qwen3_without_thinking_has_an_empty_think_block():
    start = GOLDEN["boxed_system"]
    assert rendered("boxed_system", enable_thinking=False) == f"{start}<think>\n\n</think>\n\n"
    assert rendered("boxed_system", enable_thinking=True) == start


@pytest.mark.parametrize("first", STYLES)
@pytest.mark.parametrize("second", STYLES)
def test_a_style_replaces_another(first: str, second: str):
    if second != "own":
        assert styled(STYLES[second], styled(STYLES[first], USER)) == styled(STYLES[second], USER)
    assert question_of(styled(STYLES[first], USER)) == QUESTION


def test_a_style_replaces_the_system_message_of_the_file():
    system = {"role": "system", "content": "Be brief."}
    assert rendered("bare", QWEN3, system, *USER) == GOLDEN["bare"]
    assert "Be brief." in rendered("own", QWEN3, system, *USER)


def test_a_dialogue_has_no_single_question():
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    with refused("conflict", "data.prompt_style"):
        rendered("boxed", QWEN3, *turns)
    assert rendered("own", QWEN3, *turns)


def test_style_from_a_text_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Q: {question}\nA:")
    assert rendered(str(file)) == f"Q: {QUESTION}\nA:"
    file.write_text("{question} {question}")
    with refused("wrong_value", "data.prompt_style", shows="2 times"):
        find_style(str(file))
    with refused("unreadable", "data.prompt_style"):
        find_style(str(tmp_path / "other.txt"))
    file.write_bytes(b"\xff{question}")
    with refused("unreadable", "data.prompt_style"):
        find_style(str(file))


@tabled("overrides, code, at")
def test_wrong_settings(overrides: dict, code: str, at: str):
    with refused(code, at):
        Encoder(qwen(), **overrides)


def test_chatml_style_needs_its_special_tokens():
    tokenizer = qwen()
    tokenizer._tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    with refused("conflict", "data.prompt_style"):
        Encoder(tokenizer, style="qwen")


@pytest.mark.parametrize("template", [QWEN3, OPENS_THINK])
@pytest.mark.parametrize("trace", ["<think>\nHm. </think>\n2", "Hm. </think>\n2"])
def test_one_think_opening_in_a_demonstration_row(template: str, trace: str):
    """The prompt ends in one <think>, written by the template or the style; none is added."""
    prompts = Encoder(qwen(template), style="luffy")
    row = Problem("u", USER, "2", demonstrations=(trace,))
    prompt = prompts.text(row)
    assert prompt.endswith("assistant\n<think>\n")
    assert prompt.count("<think>\n") == 1 + TWO_SECTIONS.count("<think>\n")
    text = prompts.tokenizer.decode([*prompts.prompt(row), *prompts.demonstrations(row)[0]])
    assert text.endswith("<|im_start|>assistant\n<think>\nHm. </think>\n2<|endoftext|>")


@pytest.mark.parametrize(
    ("style", "template", "trace", "left"),
    [
        ("boxed", QWEN3, "<think>\nHm.", "<think>\nHm."),
        ("own", None, "<think>\nHm.", "<think>\nHm."),
        ("r1_zero", QWEN3, "<think> Hm.", " Hm."),
        ("r1_zero", QWEN3, "Hm.", "Hm."),
    ],
)
def test_a_trace_keeps_its_opening_where_the_prompt_has_none(
    style: str, template: str | None, trace: str, left: str
):
    prompts = Encoder(qwen(template), style=style)
    (ids,) = prompts.demonstrations(Problem("u", USER, "2", demonstrations=(trace,)))
    assert prompts.decode(ids) == left


@pytest.mark.parametrize("style", STYLES)
def test_training_and_evaluation_prompts_are_the_same_bytes(style: str):
    """The configuration alone decides the prompt, in whatever style the file was prepared."""
    options = {} if STYLES[style].text else {"enable_thinking": False}
    data = DataConfig(train="", prompt_style=style, template_options=options)
    training, evaluation = make_encoder(qwen(), data), make_encoder(qwen(), data)
    file_style = STYLES["hash"] if style != "own" else STYLES["own"]
    prepared = Problem("other", styled(file_style, USER), "2")
    assert training.text(problem()) == evaluation.text(prepared)
    assert training.prompt(problem()) == evaluation.prompt(prepared)
