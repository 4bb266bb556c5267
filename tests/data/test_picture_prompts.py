"""Prompts with pictures: ids are the stock processor's, masks and limits those of texts."""

import pytest
from chat_templates import CHATML, make_tokenizer, read
from transformers import AutoTokenizer, ProcessorMixin
from vision_models import FAMILIES, save_vision_model, square

from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.picture_processor import PictureProcessor
from postgrad.pictures import with_pictures
from postgrad.problem import Conversation, Problem

IMAGE = {"type": "image"}
PICTURES = (square("red"), square("blue", width=48, height=16))
# SmolVLM's way: the contents are parts, and a text would be lost.
PARTS_ONLY = read("parts_only")
QWEN = read("qwen_vl")
MARKED = QWEN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


def text(words):
    return {"type": "text", "text": words}


USER = {"role": "user", "content": [text("1+"), IMAGE, text("2="), IMAGE]}
SYSTEM = {"role": "system", "content": "3-"}
REPLY = {"role": "assistant", "content": "12"}
PROBLEM = Problem("a", (SYSTEM, USER), "3", images=PICTURES)


def test_a_placeholder_in_a_text_is_no_picture(tokenizers):
    for name, tokenizer in tokenizers.items():
        encoder = Encoder(tokenizer, "chat", 4096)
        processor = PictureProcessor(tokenizer)
        for token in (processor.placeholder, processor.image_token):
            nested = f"{token[:3]}{token}{token[3:]}"
            assert encoder.without_special_tokens(f"1{nested}2{token}") == "12", name
            assert encoder.scored(PROBLEM, f"1{nested}") == encoder.scored(PROBLEM, "1"), name


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: AutoTokenizer.from_pretrained(save_vision_model(folder / name, name))
        for name in FAMILIES
    }


def encoder_of(tokenizers, name, template=None, **options):
    tokenizer = tokenizers[name]
    tokenizer.chat_template = template or tokenizer.chat_template
    return Encoder(tokenizer, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_stock_processor(tokenizers, family):
    template = PARTS_ONLY if family in ("smolvlm", "idefics3") else None
    encoder = encoder_of(tokenizers, family, template)
    row = encoder.prompt_row(PROBLEM)
    assert row.images == PICTURES
    messages = with_pictures((SYSTEM, USER), [picture.open() for picture in PICTURES])
    if template:
        messages[0]["content"] = [text("3-")]
    stock = PictureProcessor(encoder.tokenizer).stock
    given = ProcessorMixin.apply_chat_template(  # SmolVLM's own asks its video processor first
        stock,
        messages,
        chat_template=encoder.tokenizer.chat_template,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
    )
    assert row.prompt == list(given["input_ids"][0])
    other = Problem("a", (SYSTEM, USER), "3", images=PICTURES[::-1])
    assert encoder.prompt_row(other).images == PICTURES[::-1]  # the same uid and messages


def test_a_template_of_parts_keeps_texts(tokenizers):
    encoder = encoder_of(tokenizers, "smolvlm", PARTS_ONLY)
    assert encoder.text(Problem("a", (SYSTEM,), "")).startswith("3-")


@pytest.mark.parametrize("template", [QWEN, MARKED])
def test_a_conversation_trains_on_the_replies_after_the_pictures(tokenizers, template):
    encoder = encoder_of(tokenizers, "qwen2_5_vl", template)
    again = {"role": "user", "content": [IMAGE, text("?")]}
    later = {"role": "assistant", "content": "345"}
    messages = (USER, REPLY, again, later)
    images = (*PICTURES, square("green"))
    problem = Problem("a", messages[:3], "", conversation=Conversation(messages), images=images)
    row = encoder.conversation(problem)
    assert row.images == images
    assert row.prompt == encoder.prompt(Problem("b", (USER,), "", images=images[:2]))
    ids = [
        token for token, is_trained in zip(row.response, row.loss_mask, strict=True) if is_trained
    ]
    end = "" if template is MARKED else "<|vision_end|>"
    assert encoder.decode_raw(ids) == f"12{end}345{end}"
    if template is QWEN:
        assert encoder.reply(problem, "345") == row.response[-4:]
    last = encoder.conversation(problem, "last")
    assert [*last.prompt, *last.response] == [*row.prompt, *row.response]
    assert problem.prompt_images == images


def test_a_style_goes_around_the_pictures(tokenizers, tmp_path):
    encoder = encoder_of(tokenizers, "qwen2_5_vl", QWEN)
    bare = Problem("a", (USER,), "", images=PICTURES)
    styled = Encoder(encoder.tokenizer, style="boxed")
    assert styled.text(bare).count("<|image_pad|>") == encoder.text(bare).count("<|image_pad|>")
    assert "boxed" in styled.text(bare)


def refusal(encode, problem):
    with pytest.raises(ConfigError) as caught:
        encode(problem)
    message = str(caught.value)
    assert problem.uid in message and "\n" not in message
    return message


def test_what_would_lose_a_picture_is_refused(tokenizers, tmp_path):
    encoder = encoder_of(tokenizers, "qwen2_5_vl", QWEN, max_prompt_tokens=8, overlong="left")
    assert "cut through its pictures" in refusal(encoder.prompt, PROBLEM)
    written = {"role": "user", "content": [text("<|image_pad|>"), IMAGE]}
    injected = Problem("a", (written,), "", images=PICTURES[:1])
    assert "2 placeholders" in refusal(encoder.prompt, injected)
    plain = Encoder(encoder.tokenizer, template="plain")
    assert "chat template" in refusal(plain.prompt, PROBLEM)


def test_a_model_of_text_refuses_pictures(tmp_path):
    from transformers import AutoConfig

    tokenizer = make_tokenizer(CHATML)
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder(AutoTokenizer.from_pretrained(tmp_path))
    assert "text only" in refusal(encoder.prompt, PROBLEM)
