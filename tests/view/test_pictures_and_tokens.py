"""Charts as image files, and decoding of single tokens."""

import json
import math
import re

import pytest
from view_runs import WORDS

from postgrad.cli.main import main
from postgrad.view.metrics import Metrics
from postgrad.view.picture import arrange, draw_poster, isolated, smooth
from postgrad.view.server import ASSETS
from postgrad.view.tokens import load_decoder


@pytest.mark.slow
def test_plot_draws_one_run_several_runs_and_a_poster(runs, tmp_path):
    one, other = runs / "finished", runs / "group" / "failed"
    assert main(["plot", str(one), str(tmp_path / "one.svg"), "--smoothing", "0"]) == 0
    svg = (tmp_path / "one.svg").read_text()
    assert svg.count("<!-- Reward -->") == 1 and "Step time by stage (s)" in svg
    assert main(["plot", str(one), str(other), str(tmp_path / "two.svg")]) == 0
    assert "group/failed" in (tmp_path / "two.svg").read_text()
    draw_poster(one, tmp_path / "poster.svg", "my words")
    assert "<!-- my words -->" in (tmp_path / "poster.svg").read_text()


def test_each_metric_is_in_one_panel_and_order_is_kept():
    names = [
        "reward/failures",
        "reward/mean",
        "reward/b",
        "reward/a",
        "stage/sample_s",
        "stage/score_s",
        "validation/loss",
        "loss",
        "own/thing",
    ]
    panels = {panel["title"]: panel_names for panel, panel_names in arrange(names)}
    assert panels["Reward"] == ["reward/mean", "reward/b", "reward/a"]
    assert panels["Loss"] == ["loss", "validation/loss"]
    assert panels["Truncated and not scored"] == ["reward/failures"]
    assert not any("own/thing" in panel_names for panel_names in panels.values())


def test_curves_have_gaps_where_steps_lack_a_metric(tmp_path):
    file = tmp_path / "metrics.jsonl"
    values = [1.0, 2.0, None, float("nan"), 5.0, float("inf"), 7.0, 8.0, None]
    for i, value in enumerate(values):
        line = {"step": i, "loss": 0.1} | ({} if value is None else {"reward/mean": value})
        validation = {"step": i, "validation/accuracy": 0.5, "watch/reward_rise": 0.2}
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n" + (json.dumps(validation) + "\n") * (i % 4 == 0))
    metrics = Metrics(file).refresh()
    steps, curve = metrics.series("reward/mean")
    assert steps == [0, 1, 3, 4, 5, 6, 7]
    assert curve == pytest.approx([1, 2, math.nan, 5, math.nan, 7, 8], nan_ok=True)
    assert isolated(curve) == [3]
    assert metrics.series("loss")[0] == list(range(9))  # validations are no gaps
    assert metrics.series("validation/accuracy") == ([0, 4, 8], [0.5] * 3)  # steps are no gaps
    assert metrics.series("watch/reward_rise") == ([0, 4, 8], [0.2] * 3)
    assert smooth(curve, 0.5)[3:5] == pytest.approx(
        [(0.25 * 1 + 0.5 * 2 + 1 * 5) / 1.75, math.nan], nan_ok=True
    )
    with file.open("a") as stream:
        stream.write('{"step": 9, "reward/mean": 9.0}\n')
    assert metrics.refresh().series("reward/mean")[0][-3:] == [7, 8, 9]


def test_smoothing_by_hand():
    assert smooth([1.0, 3.0, 5.0], 0.5) == pytest.approx(
        [1.0, (0.25 + 1.5) / 0.75, (0.125 + 0.75 + 2.5) / 0.875]
    )


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
