"""Pictures without a browser, and token ids as texts."""

import functools
import json
import operator
import re

import pytest
from view_world import WORDS

from postgrad.cli.main import main
from postgrad.view.picture import arrange, smoothed
from postgrad.view.server import ASSETS
from postgrad.view.tokens import load


def test_plot_draws_one_run_several_and_a_poster(runs, tmp_path, capsys):
    one, other = runs / "finished", runs / "group" / "failed"
    assert main(["plot", str(one), str(tmp_path / "one.svg"), "--smoothing", "0"]) == 0
    svg = (tmp_path / "one.svg").read_text()
    assert svg.count("<!-- Reward -->") == 1 and "Time of a step by stage (s)" in svg
    assert main(["plot", str(one), str(other), str(tmp_path / "two.svg")]) == 0
    assert "group/failed" in (tmp_path / "two.svg").read_text()
    assert main(["plot", "--poster", str(one), str(tmp_path / "poster.png")]) == 0
    assert (tmp_path / "poster.png").read_bytes().startswith(b"\x89PNG")
    for words, title in (
        ([], "finished: grpo on arithmetic:1"),
        (["--title", "my words"], "my words"),
    ):
        assert main(["plot", "--poster", *words, str(one), str(tmp_path / "poster.svg")]) == 0
        assert f"<!-- {title} -->" in (tmp_path / "poster.svg").read_text()
    capsys.readouterr()
    for words, part in (
        (["nowhere"], "no run folder nowhere"),
        ([str(tmp_path)], "has no metrics.jsonl"),
        ([str(one), "x.gif"], "x.gif"),
        ([str(one), "--smoothing", "2"], "--smoothing: 2"),
        ([str(one), str(other), "--poster"], "--poster shows one run"),
        ([str(one), "--postr"], "did you mean --poster?"),
        ([str(one), "--title", "mine"], "--title needs --poster"),
    ):
        assert main(["plot", *words]) == 2
        err = capsys.readouterr().err
        assert part in err and err.count("\n") == 1, err


def test_each_metric_is_in_one_panel_and_parts_stay_in_order():
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
    taken = {panel["title"]: found for panel, found in arrange(names)}
    assert taken["Reward"] == ["reward/mean", "reward/b", "reward/a"] and taken["Loss"] == [
        "loss",
        "validation/loss",
    ]
    assert taken["Truncated and failed"] == [
        "reward/failures"
    ] and "own/thing" not in functools.reduce(operator.iadd, taken.values(), [])


def test_smoothing_by_hand():
    assert smoothed([1.0, 3.0, 5.0], 0.5) == pytest.approx(
        [1.0, (0.25 + 1.5) / 0.75, (0.125 + 0.75 + 2.5) / 0.875]
    )


def test_texts_of_tokens_joined_are_the_text_also_when_a_character_is_spread_over_tokens(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces, text = load(tmp_path / "tokenizer.json"), "né 日本🙂\n<b>"
    ids = tokenizer.encode(text).ids
    texts = pieces.split([*ids, len(alphabet)])
    assert "".join(texts) == text + "<|end|>" and len(texts) == len(ids) + 1
    assert texts[1:3] == ["", "é"], "the token that completes a character carries it"
    assert pieces.split([10**6]) == ["⟨1000000⟩"]


def test_texts_of_other_tokenizers(runs):
    pieces = load(runs / "finished" / "tokenizer.json")
    assert pieces.split([1, 2, 3, 7, 8]) == [WORDS[i] for i in (1, 2, 3, 7, 8)]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", [0, 2], ids=["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(theme):
    """WCAG AA: 4.5 to 1 for text, in both palettes."""
    css = (ASSETS / "style.css").read_text()
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r"\{([^{}]*--paper:[^{}]*)\}", css)
    ]
    assert len(blocks) == 3 and blocks[1] == blocks[2], "the two ways into the dark are one palette"
    palette = blocks[theme]
    pairs = [
        (word, ground)
        for word in ("ink", "dim", "accent", "right", "wrong", "warn")
        for ground in ("paper", "card", "faint")
    ]
    pairs += [
        ("right", "right-soft"),
        ("wrong", "wrong-soft"),
        ("warn", "warn-soft"),
        ("accent", "accent-soft"),
        ("dim", "quiet-soft"),
    ]
    for word, ground in pairs:
        low, high = sorted((luminance(palette[word]), luminance(palette[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (word, ground)


def test_the_pages_panels_are_whole():
    for panel in json.loads((ASSETS / "panels.json").read_text()):
        assert panel["title"] and panel["metrics"]
