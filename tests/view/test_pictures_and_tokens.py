"""The demo's picture, and decoding of single tokens."""

import json
import re

import pytest
from view_runs import WORDS

from postgrad.view.metrics import Metrics
from postgrad.view.picture import draw_poster
from postgrad.view.server import ASSETS
from postgrad.view.tokens import load_decoder


def test_the_demo_has_a_poster(runs, tmp_path):
    draw_poster(runs / "finished", tmp_path / "poster.svg", "my words")
    assert "<!-- my words -->" in (tmp_path / "poster.svg").read_text()


def test_series_leave_out_steps_that_lack_a_metric(tmp_path):
    file = tmp_path / "metrics.jsonl"
    values = [1.0, None, float("nan"), 4.0]
    for i, value in enumerate(values):
        line = {"step": i} | ({} if value is None else {"reward/mean": value})
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
    assert Metrics(file).refresh().series("reward/mean") == ([0, 3], [1.0, 4.0])


def test_token_texts_join_to_the_text_even_if_a_character_has_several_tokens(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = load_decoder(tmp_path / "tokenizer.json")
    text = "né 日本🙂\n<b>"
    ids = tokenizer.encode(text).ids
    texts = decoder.decode_each([*ids, len(alphabet)])
    assert "".join(texts) == text + "<|end|>" and len(texts) == len(ids) + 1
    assert texts[1:3] == ["", "é"], "the last token of a character has its text"
    assert decoder.decode_each([10**6]) == ["⟨1000000⟩"]


def test_token_texts_of_other_tokenizers(runs):
    decoder = load_decoder(runs / "finished" / "tokenizer.json")
    assert decoder.decode_each([1, 2, 3, 7, 8]) == [WORDS[i] for i in (1, 2, 3, 7, 8)]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", [0, 2], ids=["light", "dark"])
def test_text_contrast_meets_wcag_aa(theme):
    """WCAG AA asks for 4.5 to 1 for text; checked in both palettes."""
    css = (ASSETS / "style.css").read_text()
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r"\{([^{}]*--paper:[^{}]*)\}", css)
    ]
    assert len(blocks) == 3 and blocks[1] == blocks[2], "both dark rules have the same palette"
    palette = blocks[theme]
    pairs = [
        (text, background)
        for text in ("ink", "dim", "accent", "right", "wrong", "warn")
        for background in ("paper", "card", "faint")
    ]
    pairs += [
        ("right", "right-soft"),
        ("wrong", "wrong-soft"),
        ("warn", "warn-soft"),
        ("accent", "accent-soft"),
        ("dim", "quiet-soft"),
    ]
    for text, background in pairs:
        low, high = sorted((luminance(palette[text]), luminance(palette[background])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, background)


def test_every_panel_has_a_title_and_metrics():
    for panel in json.loads((ASSETS / "panels.json").read_text()):
        assert panel["title"] and panel["metrics"]
