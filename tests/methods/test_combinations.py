"""Settings that cannot work together are refused before the run; the possible ones are accepted."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from method_runs import LIMIT, RECIPES, SMALL, overrides_for
from refused import refused
from tiny_runs import config_of, tree

from postgrad.config.check import check_effects
from postgrad.config.overrides import keys_in
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.prepare import prepare
from postgrad.training.report import Reporter


def check(recipe: str, model, *overrides: str) -> None:
    config = config_of(recipe, model, *SMALL, *overrides_for(recipe), *overrides)
    find_method(config.method.name)(config).check()


# Settings that cannot work together, and the keys that the error must name.
REFUSED = {
    "dapo method.refill_by=": ["refill_by"],
    "grpo method.advantage=gae": ["method.advantage=gae", "critic"],
    "ppo method.advantage=grpo": ["method.advantage=grpo"],
    "grpo method.advantage=gdpo": ["method.advantage=gdpo", "method.reward_weights"],
    "grpo_passk rollout.samples=1": ["rollout.samples=1"],
    "grpo rollout.samples=1": ["rollout.samples=1"],
    "rloo rollout.samples=1": ["rollout.samples=1"],
    "drgrpo rollout.samples=1": ["rollout.samples=1"],
    "opo rollout.samples=1": ["rollout.samples=1"],
    "optimal_token_baseline rollout.samples=1": ["rollout.samples=1"],
    "grpo method.kl=loss method.kl_estimator=k1": ["method.kl_estimator=k1", "k1+"],
    "grpo method.kl=reward method.kl_estimator=k3+": ["method.kl_estimator=k3+"],
    "gdpo method.kl=reward": ["method.kl=reward", "method.kl=loss"],
    "grpo method.advantage=classmate_separated": ["method.advantage=classmate_separated"],
    "grpo method.advantage=classmate_non_neg": ["method.advantage=classmate_non_neg"],
    "grpo method.advantage=classmate_with": ["method.advantage=classmate_with"],
    "grpo method.advantage=classmate_gdpo": ["method.advantage=classmate_gdpo"],
    "grpo method.loss_options.beta=0.5": ["method.loss=ppo_clip", "beta", "dual_clip"],
    "gspo method.dual_clip=3": ["method.loss=gspo", "dual_clip", "clip_low, clip_high"],
    "rloo method.clip_high=0.2": ["method.loss=policy_gradient", "clip_high", "none"],
    "grpo method.loss_options.advantages=1": ["method.loss=ppo_clip", "advantages"],
    "grpo method.loss=dro": ["method.loss=dro", "method.loss_options.beta"],
    "dpo method.aggregation=token-sum": ["method.aggregation=token-sum"],
    "dpo method.loss=odds_ratio": ["method.loss=odds_ratio", "method.reference_free=true"],
    "kto training.problems_per_step=1": ["training.problems_per_step=1"],
    "kto method.aggregation=token-sum": ["method.aggregation=token-sum"],
    "online_dpo rollout.samples=1": ["rollout.samples=1"],
    "online_dpo rollout.top_p=0.9": ["rollout.top_p"],
    "dpo method.beta=0": ["method.beta=0.0", "above 0"],
    f"dapo method.overlong_buffer={LIMIT + 1}": [
        f"method.overlong_buffer={LIMIT + 1}",
        f"rollout.max_response_tokens={LIMIT}",
    ],
    "exgrpo rollout.top_p=0.9": ["rollout.top_p"],
    "bupo rollout.top_k=5": ["rollout.top_k"],
    "grpo rollout.min_p=0.1 rollout.engine=http rollout.url=http://a/v1#m": ["rollout.min_p"],
    "grpo training.updates_per_step=5": ["training.updates_per_step=5"],
    "grpo method.loss=gspoo": ["method.loss=gspoo", "did you mean gspo?"],
    "grpo method.advantage=rlo": ["method.advantage=rlo", "did you mean rloo?"],
    "dpo method.loss=sigmoyd": ["method.loss=sigmoyd", "did you mean sigmoid?"],
    "grpo method.kl=loss method.kl_estimator=k4": ["method.kl_estimator=k4"],
    "grpo method.aggregation=token-meen": ["did you mean token-mean?"],
    "grpo method.clip_hi=0.3": ["method.clip_hi", "did you mean method.clip_high?"],
    "grpo method.critic_lr=1e-5": ["method.critic_lr"],
    "grpo method.correction=token method.correction_bound=two": [
        "method.correction_bound",
        "'two'",
    ],
    "grpo method.correction=token method.correction_bound='2.0_0.5'": [
        "method.correction_bound",
        "low < high",
    ],
    "grpo method.correction=token method.rejection.token_k4=2.0": [
        "method.rejection",
        "did you mean token_k",
    ],
    "grpo method.correction=rejection": ["method.correction=rejection", "method.rejection."],
    "grpo method.loss=clip_cov method.loss_options.cov_low=6": ["cov_low=6", "cov_high"],
    "grpo method.loss=kl_cov method.loss_options.cov_share=0": ["cov_share=0"],
    "grpo method.loss=kl_cov method.loss_options.cov_low=1": ["cov_low"],
    "grpo reward.judge.monitor=http://a/v1#m": ["reward.judge.monitor"],
    "sft training.stop_at=0.5 data.validation=a.jsonl training.validate_every=1": [
        "method.validate_accuracy=true"
    ],
    "bupo method.num_blocks=0": ["method.num_blocks=0"],
    "bupo method.phase_one_steps=5": ["method.phase_one_steps=5", "training.steps=2"],
    "bupo method.lr_scale_below=0": ["method.lr_scale_below=0"],
    "bupo method.internal_norm=finall": ["method.internal_norm=finall"],
    "bupo method.lr_scale_above=-1": ["method.lr_scale_above=-1"],
    "bupo method.num_block=1": ["method.num_block;", "did you mean method.num_blocks?"],
    "classmate method.classmates=[]": ["method.classmates"],
    "classmate method.classmate_shares=[1,2]": ["method.classmate_shares"],
    "classmate method.classmate_shares=[0]": ["method.classmate_shares=[0.0]"],
    "classmate method.classmates=['',''] method.classmate_shares=[1,-1]": [
        "method.classmate_shares"
    ],
    "classmate method.keep=2": ["method.keep=2"],
    "classmate method.keep=first-3-tokens": ["method.keep_unit=tokens"],
    "classmate method.keep_min=0.97": ["method.keep_max=0.95"],
    "classmate method.cot_start=x": ["method.cot_end"],
    "classmate method.kl=reward": ["method.kl=reward"],
    "classmate method.advantage=grpo": ["method.advantage=grpo"],
    "classmate method.reward_type=help_other_questions training.problems_per_step=1": [
        "training.problems_per_step"
    ],
    "classmate method.consistency_weight=1 reward.verifier=llm_judge": [
        "method.consistency_weight"
    ],
    "luffy method.num_demonstrations=5": ["method.num_demonstrations=5", "rollout.samples=4"],
    "luffy method.prefix_min=0.5 method.prefix_max=0.2": ["method.prefix_min", "prefix_max"],
    "luffy method.prefix_strategy=linear_variance": ["method.prefix_strategy=linear_variance"],
    "luffy method.demonstration_probs=x method.prefix_min=0.5": ["method.demonstration_probs"],
    "luffy method.demonstration_probs=x method.sft_coef=1": ["method.sft_coef=0"],
    "luffy method.off_options.gama=0.1": ["method.off_options.gama", "did you mean gamma?"],
    "luffy method.on_options.min_value=0.1": ["method.on_options.min_value"],
    "luffy method.off_options.gamma=0": ["method.off_options.gamma=0.0"],
    "luffy method.off_options.min_value=0.8 method.off_options.max_value=0.2": [
        "method.off_options.min_value=0.8",
        "method.off_options.max_value=0.2",
    ],
    "luffy method.loss=gspo": ["method.loss=gspo"],
    "luffy method.advantage=gae": ["method.advantage=gae"],
    "exgrpo method.max_refills=2": ["method.max_refills=2"],
}


# Options that a shape does not take: the last one, and the reason that the error names.
WITHOUT_EFFECT = {
    "luffy_rl_sft method.off_options.gamma=0.3": "with method.sft_coef",
    "luffy method.demonstration_probs=x method.off_options.gamma=0.3": (
        "with method.off_shape=none"
    ),
    "luffy method.off_options.weight=0.2": "with method.off_shape=p_div_p",
    "luffy method.off_shape=logp method.off_options.exponent=2": "with method.off_shape=logp",
    "luffy method.on_options.gamma=0.3": "with method.on_shape=none",
    "exgrpo method.on_shape=logp method.on_options.weight=0.3": "with method.on_shape=logp",
}


# Options that a shape takes, and settings that something reads beside others.
WITH_EFFECT = [
    "ppo method.normalize_by_std=true method.kl_estimator=auto rollout.max_logprob_difference=0",
    "luffy method.off_shape=logp method.off_options.weight=0.2",
    "luffy method.off_shape=pow method.off_options.exponent=2 method.off_options.max_value=1",
    "luffy method.on_shape=p_div_p method.on_options.gamma=0.3 method.prefix_advantage=1",
    "luffy method.demonstration_probs=x method.off_options.max_value=2",
    "classmate_think method.condition=no_classmate",
    "classmate_self method.condition=no_classmate",
    "classmate_gdpo method.advantage=classmate_separated",
]


@cache
def composed(recipe: str, model: Path) -> Config:
    return config_of(recipe, model, *SMALL, *overrides_for(recipe))


def check_quickly(recipe: str, model: Path, *overrides: str) -> None:
    """As `check`, with words of known keys put into a recipe that is composed once."""
    config = copy.deepcopy(composed(recipe, model))
    for word in overrides:
        key, _, value = word.partition("=")
        *path, leaf = key.split(".")
        owner: Any = config
        for part in path:
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        assert isinstance(owner, dict) or hasattr(owner, leaf), word
        (owner if isinstance(owner, dict) else vars(owner))[leaf] = yaml.safe_load(value)
    check_effects(config, keys_in(overrides))
    find_method(config.method.name)(config).check()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", WITH_EFFECT)
def test_setting_that_is_read_is_accepted(overrides, tiny):
    check_quickly(overrides.split()[0], tiny, *overrides.split()[1:])


@pytest.mark.parametrize("overrides", WITHOUT_EFFECT)
def test_option_without_effect_is_refused_by_its_key(overrides, tiny):
    recipe, *given = overrides.split()
    with pytest.raises(ConfigError) as caught:
        check_quickly(recipe, tiny, *given)
    line = str(caught.value)
    assert line.startswith(f"{given[-1]} has no effect ") and "\n" not in line, line
    assert WITHOUT_EFFECT[overrides] in line, line


@pytest.mark.parametrize("overrides", REFUSED)
def test_settings_that_exclude_each_other_are_refused(overrides, tiny):
    with pytest.raises(ConfigError) as caught:
        check(overrides.split()[0], tiny, *overrides.split()[1:])
    line = str(caught.value)
    assert "\n" not in line
    assert all(key in line for key in REFUSED[overrides]), line


def test_refused_run_writes_nothing(tiny, tmp_path):
    config = config_of("grpo", tiny, *SMALL, "method.advantage=gae", f"runs={tmp_path}")
    with refused("conflict", "method.advantage"):
        train(config, Reporter())
    assert tree(tmp_path) == {}


OVERLONG_PART = (
    "grpo reward.verifier=exact method.advantage=gdpo method.reward_weights={overlong:1}"
)
# Parts of the score that the settings name, and what the refusal says; "" if the run may start.
PARTS = {
    "gdpo reward.verifier=boxed": "",
    "gdpo reward.verifier=exact": "method.reward_weights.format",
    f"{OVERLONG_PART} method.overlong_buffer=2": "",
    OVERLONG_PART: "method.reward_weights.overlong",
    "dapo reward.verifier=exact method.refill_by=answer": "",
    "dapo reward.verifier=exact method.refill_by=format": "method.refill_by=format",
    "grpo reward.verifier=exact method.refill_by=format method.max_refills=1": "refill_by=format",
}


@pytest.mark.parametrize("overrides", PARTS)
def test_part_of_the_score_that_is_not_reported_is_refused_before_the_run(overrides, tiny):
    recipe, *given = overrides.split()
    config = config_of(recipe, tiny, *SMALL, *overrides_for(recipe), *given)
    if not PARTS[overrides]:
        prepare(config).scorer.close()
        return
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    line = str(caught.value)
    assert PARTS[overrides] in line and "of its parts: answer" in line and "\n" not in line


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_accepted(recipe, tiny):
    check(recipe, tiny)


ALLOWED = [
    "remax rollout.samples=1",
    "reinforce_pp rollout.samples=1",
    "ppo rollout.samples=1",
    "grpo method.kl=reward method.kl_target=0.1 method.kl_estimator=k1",
    "grpo method.kl=loss method.kl_estimator=k1+",
    "grpo method.kl=loss method.kl_estimator=k1 method.kl_ratio=true",
    "grpo method.kl=loss method.kl_estimator=abs+",
    "grpo method.loss=dro method.loss_options.beta=0.5",
    "grpo method.loss=sapo method.loss_options.temperature_negative=1.1",
    "grpo method.loss=dppo_tv method.loss_options.max_ratio=3 method.clip_low=0.1",
    "grpo method.clip_low=inf method.clip_high=inf",
    f"grpo method.overlong_buffer={LIMIT}",
    "grpo method.correction=sequence method.correction_bound='0.5_5' "
    "method.rejection.seq_mean_k1='0.5_2.0'",
    "grpo method.correction=token method.rejection.token_k2=0.3",
    "grpo method.advantage=grpo_split",
    "grpo method.advantage=tir_optimal_token_baseline",
    "gdpo method.kl=loss",
    "sft rollout.top_p=0.9",
    "ppo rollout.top_p=0.9 rollout.top_k=5",
    "luffy rollout.min_p=0.1",
    "dpo rollout.top_p=0.9",
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ALLOWED)
def test_possible_combinations_are_allowed(overrides, tiny):
    check(overrides.split()[0], tiny, *overrides.split()[1:])
