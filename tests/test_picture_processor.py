"""The stock processors, without torchvision: placeholders become tokens, pictures become pixels."""

from types import SimpleNamespace

import pytest
import torch
from refused import refused
from transformers import AutoConfig, AutoTokenizer
from vision_models import FAMILIES, save_vision_model, square

from postgrad.errors import ConfigError, Unsupported
from postgrad.machine import is_installed
from postgrad.picture_processor import PictureProcessor

MESSAGE = [
    {"type": "text", "text": "1+"},
    {"type": "image"},
    {"type": "text", "text": "2="},
    {"type": "image"},
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_and_pixels_are_those_of_the_stock_processor(model_type, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_vision_model(tmp_path, model_type))
    processor = PictureProcessor(tokenizer)
    pictures = [square("red"), square("blue", width=48, height=16)]
    messages = [{"role": "user", "content": MESSAGE}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(processor.expand(text, pictures))["input_ids"]
    images = [picture.open() for picture in pictures]
    stock = processor.stock(images=[images], text=[text], return_tensors="pt")
    assert ids == stock["input_ids"][0].tolist()
    pixels = [processor.pixels([picture])["pixel_values"] for picture in pictures]
    of_crops = 1 if model_type in ("smolvlm", "idefics3") else 0
    torch.testing.assert_close(torch.cat(pixels, of_crops), stock["pixel_values"])
    assert ids.count(processor.image_token_id) >= 7
    assert processor.expand("1+2=", []) == "1+2="
    assert processor.collapse(ids, pictures) == tokenizer(text)["input_ids"]
    with refused("unsupported", shows="join those of the text"):
        processor.collapse(ids[:-9], pictures)
    with refused("unsupported", shows=r"2 placeholders .* 1 pictures"):
        processor.expand(text, pictures[:1])


def test_an_image_token_in_the_text_is_refused(tmp_path):
    folder = save_vision_model(tmp_path, "gemma3")  # its templates write another placeholder
    processor = PictureProcessor(AutoTokenizer.from_pretrained(folder))
    text = f"{processor.placeholder} and {processor.image_token}"
    with pytest.raises(Unsupported, match="in its text"):
        processor.expand(text, [square("red")])


def test_a_folder_without_processor_files_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_vision_model(tmp_path, "qwen3_vl"))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="copy preprocessor_config") as caught:
        PictureProcessor(tokenizer)
    assert "\n" not in str(caught.value)


def test_a_model_of_text_only_is_refused(tiny):
    with pytest.raises(ConfigError, match="text only"):
        PictureProcessor(AutoTokenizer.from_pretrained(tiny))


def test_an_adapter_without_its_model_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused("unsupported", tmp_path, shows="cannot read pictures"):
        PictureProcessor(SimpleNamespace(name_or_path=tmp_path))


@pytest.mark.skipif(is_installed("torchvision"), reason="gemma4's processor can be imported")
def test_a_processor_that_needs_another_package_is_refused(tmp_path):
    AutoConfig.for_model("gemma4").save_pretrained(tmp_path)
    with refused("not_installed", tmp_path, shows="No module named 'torchvision'"):
        PictureProcessor(SimpleNamespace(name_or_path=tmp_path))
