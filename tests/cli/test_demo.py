"""`postgrad demo`: the complete demo, its picture and its errors."""

import json
import re
from pathlib import Path

import preloaded
import pytest

from postgrad.view.picture import read_sample_answers

# The demo with a quarter of its GRPO steps.
SHORT_DEMO = f"""
from postgrad.cli import demo
compose = demo.compose

def compose_short(recipe, overrides, settings):
    if recipe == "demo_grpo":
        overrides = [*overrides, "training.steps=45", "training.validate_every=45"]
    return compose(recipe, overrides, settings)

demo.compose = compose_short
{preloaded.COMMAND}
"""


@pytest.mark.slow
def test_a_short_demo_learns_to_add_and_its_output_shows_it(tmp_path):
    """Greedy accuracy on held-out sums rises from below 40% to above 70% in 45 steps of GRPO."""
    assert run_demo(SHORT_DEMO, tmp_path)[-1] > 0.70


@pytest.mark.long
def test_the_demo_learns_to_add(tmp_path):
    """Greedy accuracy on held-out sums rises from below 40% to above 85%."""
    assert run_demo(preloaded.COMMAND, tmp_path)[-1] > 0.85


def run_demo(program: str, tmp_path: Path) -> list[float]:
    """Runs the demo and checks what it prints; returns the greedy accuracies of GRPO."""
    done = preloaded.run(program, "demo", "seed=2", f"runs={tmp_path}", timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "demo-tiny-2"
    lines = [
        json.loads(line) for line in (folder / "2-grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    greedy = [line["validation/accuracy"] for line in lines if "validation/accuracy" in line]
    sampled = [
        line["validation/sampled_accuracy"] for line in lines if "validation/accuracy" in line
    ]
    assert greedy[0] < 0.40, greedy
    assert sampled[-1] > sampled[0] + 0.2, sampled
    assert (folder / "demo.png").stat().st_size > 20_000
    for text in (
        "before GRPO",
        "accuracy, greedy",
        "accuracy, sampled",
        f"{greedy[0]:.1%}",
        f"{greedy[-1]:.1%}",
        "postgrad view",
        "postgrad demo model=smollm2",
        "postgrad doctor --fit",
    ):
        assert text in done.stdout, text
    return greedy


@pytest.mark.slow
def test_a_demo_with_pictures_shows_them_beside_the_answers(tmp_path):
    done = preloaded.run(
        preloaded.COMMAND, "demo", "model=vision", "steps=2", f"runs={tmp_path}", timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "demo-vision-0"
    assert (folder / "demo.png").stat().st_size > 20_000
    first, last = read_sample_answers(folder / "2-grpo")
    for text, _, picture in [*first[1], *last[1]]:
        assert picture.is_file(), text
    assert "postgrad view" in done.stdout


def test_the_suggested_next_run_starts_with_sft(capsys, tmp_path):
    """GRPO alone on the untrained tiny model would never see a right answer and would stop."""
    from postgrad.cli.demo import _print_next_steps
    from postgrad.cli.train import compose_arguments

    _print_next_steps("tiny", tmp_path / "demo" / "2-grpo", tmp_path / "demo.png")
    (line,) = re.findall(r"postgrad train (demo_grpo .*?)    ", capsys.readouterr().out)
    config = compose_arguments(line.split())
    assert (config.model.path, config.warmup.recipe) == ("tiny", "demo_sft")
