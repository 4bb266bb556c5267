"""Every recipe trains two steps of the tiny model: metrics are finite and weights change."""

import math
from pathlib import Path

import pytest
import torch
from core_recipes import recipe_params
from method_runs import (
    DISTILL_RECIPES,
    GIVEN_RECIPES,
    LIMIT,
    RECIPES,
    SAMPLING_RECIPES,
    SIZES_ONLY,
    run,
)
from safetensors.torch import load_file

# Metrics that name what a recipe is about; a run that lacks one did something else.
OWN_METRICS = {
    "dapo": ("refill/times", "reward/overlong"),
    "verl_grpo": ("kl/reference",),
    "ppo": ("critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/clip_fraction"),
    "reinforce_pp": ("kl/reference", "kl/coef"),
    "reinforce_pp_baseline": ("kl/reference",),
    "gdpo": ("reward/answer", "reward/format"),
    "clip_cov": ("policy/selected_fraction",),
    "kl_cov": ("policy/selected_fraction",),
    "dppo_tv": ("policy/clip_fraction",),
    "online_dpo": ("dpo/groups_with_pair", "dpo/margin"),
    "bupo": ("phase", "blocks_run", "full/entropy"),
}


WITHOUT_GAP = ("online_dpo",)  # its loss does not read the engine's log-probs


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_sound(lines: list[dict], model: Path, runs: Path) -> None:
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), {
            k: v for k, v in line.items() if not math.isfinite(v)
        }
        assert line["grad_norm"] > 0
    before, after = (
        weights_in(model),
        weights_in(runs / "test" / "checkpoints" / "step-2" / "policy"),
    )
    assert before.keys() == after.keys()
    assert all(torch.isfinite(w).all() for w in after.values())
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_no_recipe_is_forgotten():
    assert {*SAMPLING_RECIPES, *GIVEN_RECIPES, *DISTILL_RECIPES, *SIZES_ONLY} == set(RECIPES)
    assert len(SAMPLING_RECIPES) >= 40


@pytest.mark.parametrize("recipe", recipe_params(SAMPLING_RECIPES, slow=OWN_METRICS))
def test_a_recipe_that_samples_trains(recipe, tiny, verifiers, tmp_path):
    lines = run(recipe, tiny, tmp_path, "optimizer.lr=1e-3", f"reward.verifier={verifiers}:graded")
    assert_sound(lines, tiny, tmp_path)
    for line in lines:
        assert {
            "loss",
            "entropy",
            "reward/mean",
            *OWN_METRICS.get(recipe, ()),
        } <= line.keys()
        assert 1 <= line["response/length"] <= LIMIT
        if recipe not in WITHOUT_GAP:
            assert line["engine/gap_max"] < 1e-4
        assert line["advantages/rows_with_signal"] > 0
