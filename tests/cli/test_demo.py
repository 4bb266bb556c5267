"""`postgrad demo` as a newcomer runs it: the whole of it, its bars, its picture and its errors."""

import json
import re
import subprocess
import sys

import pytest

from postgrad.cli.main import main


def demo(*overrides, timeout=1200):
    command = [sys.executable, "-m", "postgrad.cli.main", "demo", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_the_tiny_model_learns_to_add_and_the_end_shows_it(tmp_path):
    """Greedy accuracy on held-out sums from below 40 % to above 85 %; no test of time, which is the machine's."""
    done = demo("seed=2", f"runs={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "demo-tiny-2"
    lines = [
        json.loads(line) for line in (folder / "2-grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    greedy = [line["validation/accuracy"] for line in lines if "validation/accuracy" in line]
    sampled = [
        line["validation/sampled_accuracy"] for line in lines if "validation/accuracy" in line
    ]
    assert greedy[0] < 0.40 and greedy[-1] > 0.85, greedy
    assert sampled[-1] > sampled[0] + 0.2, sampled
    assert (folder / "demo.png").stat().st_size > 20_000
    for overrides in (
        "before GRPO",
        "right, greedy",
        "right, sampled",
        f"{greedy[0]:.1%}",
        f"{greedy[-1]:.1%}",
        "postgrad view",
        "postgrad demo model=smollm2",
        "postgrad doctor --fit",
    ):
        assert overrides in done.stdout, overrides


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=tniy", "tiny"),
        ("sed=1", "seed"),
        ("seed=one", "seed=one is not a whole number"),
        ("again", "'again'"),
    ],
)
def test_a_wrong_word_gets_one_line_and_writes_nothing(word, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", word]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and list(tmp_path.iterdir()) == []


def test_what_the_demo_says_to_try_next_starts_from_a_model_that_was_shown_answers():
    """GRPO alone on the bare tiny model would see no right answer and stop."""
    import inspect

    from postgrad.cli import demo
    from postgrad.cli.train import compose_words

    (line,) = re.findall(r"postgrad train (demo_grpo [^\n]*?)    ", inspect.getsource(demo))
    config = compose_words(line.split())
    assert (config.model.path, config.warmup.recipe) == ("tiny", "demo_sft")
