"""A model of Qwen3-VL's architecture learns to count shapes and name their colors, from scratch."""

from pathlib import Path

import pytest
from tiny_runs import metrics_of

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.training import checkpoint
from postgrad.training.driver import train
from postgrad.training.report import Reporter

KINDS = ("count", "color")


def sources(split: str) -> str:
    return ",".join(f"scenes:{kind}:{split}" for kind in KINDS)


def train_recipe(recipe: str, *overrides: str) -> tuple[Path, list[dict[str, float]]]:
    """Return the trained model and the validations."""
    config = compose(recipe, overrides, lambda method: find_method(method).Settings)
    folder = train(config, Reporter()).folder
    lines = [line for line in metrics_of(folder) if "validation/accuracy" in line]
    return Path(f"{checkpoint.latest(folder)}/policy"), lines


@pytest.mark.nightly
def test_sft_teaches_to_count_and_to_name_colors_and_grpo_raises_it(tmp_path):
    """The measure is the share of right answers about held-out pictures, one sampled per picture.

    SFT stops while about half of them are wrong.
    """
    common = [f"data.train={sources('train')}", f"runs={tmp_path}"]
    model, (untrained, *_) = train_recipe(
        "demo_vision_sft",
        *common,
        "name=sft",
        f"data.validation={sources('validation')}",
        "optimizer.lr=1.5e-3",
        "training.stop_at=0.6",
        "training.validate_every=5",
        "training.validation_problems=200",
    )
    assert untrained["validation/accuracy"] < 0.05
    _, (before, *_, after) = train_recipe(
        "demo_vision_grpo",
        *common,
        "name=grpo",
        f"model.path={model}",
        f"data.validation={sources('test')}",
        "training.steps=40",
        "training.validate_every=40",
    )
    measure = "sampled_accuracy"
    assert after[f"validation/{measure}"] > before[f"validation/{measure}"] + 0.1
    for kind, guessed in (("count", 1 / 6), ("color", 0.64)):  # 0.64: some color of the picture
        assert after[f"validation/scenes-{kind}-test/{measure}"] > guessed + 0.1
