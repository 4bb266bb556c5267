"""The authors' recipes have the authors' values: the tables of defaults of the five originals.

A value here is the one in the original's launch script. Where the recipe differs, `differs` has the
recipe's value and the reason, so that a difference is never silent.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from postgrad.config.compose import compose, recipe_names
from postgrad.methods import find_method

# recipe -> the authors' values
ORIGINALS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("originals.yaml").read_text()
)["recipes"]

SUM_OVER_64 = "the authors sum over the 64 rows of a rank; here the loss is a mean over rows"
SUM_OVER_56 = "the authors sum over the 56 own rows of a rank; here the loss is a mean over rows"
SCALED = {
    "optimizer.max_grad_norm": (1 / 64, SUM_OVER_64),
    "method.entropy_coef": (0.001 * 4 / 64, SUM_OVER_64 + ", and entropy counts per micro-batch"),
}
# recipe -> key -> (our value, why it is not the authors')
DIFFERS: dict[str, dict[str, tuple[Any, str]]] = {
    "luffy": SCALED,
    "luffy_on_policy": SCALED,
    "luffy_sft_rl": SCALED,
    "luffy_rl_sft": {
        "optimizer.max_grad_norm": (0.0179, SUM_OVER_56),
        "method.entropy_coef": (7.14e-5, SUM_OVER_56),
        "method.sft_coef": (0.0714, SUM_OVER_56 + ", and one SFT mean per micro-batch"),
    },
    "exgrpo": {**SCALED, "optimizer.skip_grad_norm": (500 / 64, SUM_OVER_64)},
    "bupo_llama": {"method.phase_one_steps": (20, "the paper's; the script says 30")},
}


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ORIGINALS)
def test_recipe_has_the_authors_values(recipe):
    config = compose(recipe, [], lambda name: find_method(name).Settings, complete=False)
    differs = DIFFERS.get(recipe, {})
    assert set(differs) <= set(ORIGINALS[recipe]), "every difference is one from a listed value"
    for key, theirs in ORIGINALS[recipe].items():
        ours, reason = differs.get(key, (theirs, ""))
        assert value_of(config, key) == ours, (key, reason)
        assert key not in differs or (ours != theirs and reason), f"{key} does not differ any more"


@pytest.mark.slow
def test_every_original_has_a_small_variant_or_is_small():
    """Runs for many GPUs have a recipe of the same method for one small machine."""
    small = {
        "verl_grpo": "grpo",
        "verl_ppo": "ppo",
        "verl_dapo": "dapo",
        "luffy": "luffy_small",
        "luffy_on_policy": "luffy_on_policy_small",
        "luffy_rl_sft": "luffy_rl_sft_small",
        "luffy_sft_rl": "luffy_sft_rl_small",
        "exgrpo": "exgrpo_small",
        "bupo": "bupo_small",
        "classmate_sycophancy": "classmate",
        "classmate_baseline": "classmate_baseline_small",
        "classmate_warmup": "classmate_warmup_small",
    }
    assert set(small.values()) <= set(recipe_names())
    for large, tiny in small.items():
        both = [
            compose(name, [], lambda name: find_method(name).Settings, complete=False)
            for name in (large, tiny)
        ]
        assert both[0].method.name == both[1].method.name
        assert both[1].training.problems_per_step <= 16
        assert both[1].rollout.max_response_tokens <= 480
