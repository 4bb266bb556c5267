"""Settings that cannot work together are refused before the run, in one line that says what to do instead; the possible ones pass."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lessons import LIMIT, RECIPES, SMALL, overrides_for
from world import config_of, tree

from postgrad.config.compose import record_overrides
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.training.driver import train
from postgrad.training.report import Reporter


def check(recipe: str, model, *overrides: str) -> None:
    config = config_of(recipe, model, *SMALL, *overrides_for(recipe), *overrides)
    find_method(config.method.name)(config).check()


REFUSED = {
    "gae without a critic": (
        "grpo method.advantage=gae",
        r"method\.advantage=gae needs a critic; grpo has none: use the recipe ppo",
    ),
    "ppo with another estimator": (
        "ppo method.advantage=grpo",
        r"method\.advantage=grpo is not one of its values; .*gae",
    ),
    "gdpo without named rewards": (
        "grpo method.advantage=gdpo",
        r"add e\.g\. method\.reward_weights\.answer=1\.0",
    ),
    "passk with one sample": (
        "grpo_passk rollout.samples=1",
        r"rollout\.samples=1: grpo_passk compares .* use rollout\.samples=8",
    ),
    "grpo with one sample": (
        "grpo rollout.samples=1",
        r"rollout\.samples=1: grpo compares within a group; use rollout\.samples=8",
    ),
    "rloo with one sample": ("rloo rollout.samples=1", r"use rollout\.samples=8"),
    "drgrpo with one sample": ("drgrpo rollout.samples=1", r"use rollout\.samples=8"),
    "opo with one sample": ("opo rollout.samples=1", r"use rollout\.samples=8"),
    "token baseline with one sample": (
        "optimal_token_baseline rollout.samples=1",
        r"use rollout\.samples=8",
    ),
    "kl_target without kl": (
        "grpo method.kl_target=0.1",
        r"method\.kl_target=0\.1 steers .*add method\.kl=reward or remove it",
    ),
    "kl_target with kl in the loss": (
        "grpo method.kl=loss method.kl_target=0.1",
        r"add method\.kl=reward or remove it",
    ),
    "straight-through in the reward": (
        "grpo method.kl=reward method.kl_estimator=k3+",
        r"method\.kl_estimator=k3\+ changes gradients, and a reward has none; use k1, k2, k3 or abs",
    ),
    "one KL in several rewards": (
        "gdpo method.kl=reward",
        r"gdpo has several: use method\.kl=loss",
    ),
    "classmate_separated": (
        "grpo method.advantage=classmate_separated",
        r"needs a classmate; grpo has none: use the recipe",
    ),
    "classmate_non_neg": (
        "grpo method.advantage=classmate_non_neg",
        r"needs a classmate; grpo has none: use the recipe",
    ),
    "classmate_with": (
        "grpo method.advantage=classmate_with",
        r"needs a classmate; grpo has none: use the recipe",
    ),
    "classmate_gdpo": (
        "grpo method.advantage=classmate_gdpo",
        r"needs a classmate; grpo has none: use the recipe",
    ),
    "option of another loss": (
        "grpo method.loss_options.beta=0.5",
        r"method\.loss=ppo_clip has no setting beta; it takes clip_low, clip_high, dual_clip$",
    ),
    "dual clip without one": (
        "gspo method.dual_clip=3",
        r"method\.loss=gspo has no setting dual_clip; it takes clip_low, clip_high$",
    ),
    "clip without one": (
        "rloo method.clip_high=0.2",
        r"method\.loss=policy_gradient has no setting clip_high; it takes none",
    ),
    "a column as an option": (
        "grpo method.loss_options.advantages=1",
        r"has no setting advantages; it takes clip_low",
    ),
    "dro without beta": (
        "grpo method.loss=dro",
        r"method\.loss=dro needs method\.loss_options\.beta=NUMBER",
    ),
    "smoothing with ipo": (
        "dpo method.loss=ipo method.label_smoothing=0.1",
        r"label_smoothing=0\.1 is for method\.loss=sigmoid only",
    ),
    "smoothing with hinge": (
        "dpo method.loss=hinge method.label_smoothing=0.1",
        r"is for method\.loss=sigmoid only",
    ),
    "smoothing of one half": (
        "dpo method.label_smoothing=0.5",
        r"label_smoothing=0\.5 must be below 0\.5",
    ),
    "aggregation of pairs": (
        "dpo method.aggregation=token-sum",
        r"has no effect: dpo weighs all pairs alike; remove it",
    ),
    "dpo without beta": (
        "dpo method.beta=0",
        r"method\.beta=0\.0 is out of range; it must be above 0",
    ),
    "overlong buffer": (
        f"dapo method.overlong_buffer={LIMIT + 1}",
        rf"method\.overlong_buffer={LIMIT + 1} exceeds rollout\.max_response_tokens={LIMIT}; lower it",
    ),
    "top_p": (
        "grpo rollout.top_p=0.9",
        r"rollout\.top_p changes what is sampled .* remove rollout\.top_p",
    ),
    "top_k": ("ppo rollout.top_k=5", r"remove rollout\.top_k"),
    "min_p": ("remax rollout.min_p=0.1", r"remove rollout\.min_p"),
    "more updates than problems": (
        "grpo training.updates_per_step=5",
        r"training\.updates_per_step=5 exceeds training\.problems_per_step=4; an update needs at least one problem",
    ),
    "unknown loss": (
        "grpo method.loss=gspoo",
        r"method\.loss=gspoo is not one of its values; did you mean gspo\?",
    ),
    "unknown advantage": (
        "grpo method.advantage=rlo",
        r"method\.advantage=rlo is not one of its values; did you mean rloo\?",
    ),
    "unknown preference loss": ("dpo method.loss=sigmoyd", r"did you mean sigmoid\?"),
    "unknown KL estimator": (
        "grpo method.kl=loss method.kl_estimator=k4",
        r"method\.kl_estimator=k4 is not one of its values",
    ),
    "unknown aggregation": ("grpo method.aggregation=token-meen", r"did you mean token-mean\?"),
    "unknown setting": (
        "grpo method.clip_hi=0.3",
        r"unknown key method\.clip_hi; did you mean method\.clip_high\?",
    ),
    "a critic's setting in grpo": ("grpo method.critic_lr=1e-5", r"unknown key method\.critic_lr"),
    "unreadable correction bound": (
        "grpo method.correction_bound=two",
        r"method\.correction_bound: bound 'two' is not a positive number",
    ),
    "correction bounds the wrong way round": (
        "grpo method.correction_bound='2.0_0.5'",
        r"method\.correction_bound: .*0 < low < high",
    ),
    "unknown rejection rule": (
        "grpo method.rejection.token_k4=2.0",
        r"method\.rejection: unknown rejection rule 'token_k4'; did you mean token_k",
    ),
    "rejection that is switched off": (
        "grpo method.correction=none method.rejection.token_k1=2.0",
        r"use method\.correction=rejection for rules without weights",
    ),
    "rejection without a rule": (
        "grpo method.correction=rejection",
        r"has no rules; add one, e\.g\. method\.rejection\.seq_mean_k1",
    ),
    "a bound of weights where there are none": (
        "grpo method.correction=rejection method.rejection.token_k1=2.0 method.correction_bound=3",
        r"method\.correction_bound=3 bounds weights, and method\.correction=rejection has none",
    ),
}


# A setting that nothing reads beside the others: which, beside what, and what else the line must say.
WITHOUT_EFFECT = {
    "ppo method.normalize_by_std=false": r"with method\.advantage=gae, which has no such division; leave it at true",
    "reinforce_pp method.normalize_by_std=false": r"with method\.advantage=reinforce_pp, .*leave it at true",
    "remax method.normalize_by_std=false": r"with method\.advantage=remax",
    "optimal_token_baseline method.normalize_by_std=false": r"with method\.advantage=optimal_token_baseline",
    "grpo method.kl_estimator=k1": r"with method\.kl=none; add method\.kl=loss, or leave it at k3",
    "grpo method.kl_coef=0.1": r"with method\.kl=none; add method\.kl=loss, or leave it at 0\.001",
    "grpo method.correction=none method.correction_bound=3": r"with method\.correction=none; leave it at 2\.0",
    "grpo rollout.max_gap=0.5": r"on an engine that samples from the trainer's own weights; leave it at 0",
    "sft rollout.engine=hf rollout.max_gap=0.5": r"from the trainer's own weights",
    "sft method.validate_accuracy=true": r"without problems to answer; add data\.validation=FILE, or leave it at false",
    "luffy method.prefix_peak=0.5": r"with method\.prefix_strategy=random; leave it at 0\.8",
    "luffy method.prefix_strategy=fixed method.prefix_steps=10": r"with method\.prefix_strategy=fixed; leave it at 1000",
    "luffy method.prefix_strategy=linear method.prefix_min=0.1": r"with method\.prefix_strategy=linear; leave it at 1",
    "luffy method.prefix_strategy=linear method.prefix_shared=true": r"with method\.prefix_strategy=linear; leave it at false",
    "luffy method.prefix_strategy=linear_max method.prefix_max=0.5": r"with method\.prefix_strategy=linear_max",
    "luffy method.prefix_strategy=reverse_linear method.prefix_min=0.5": r"with method\.prefix_strategy=reverse_linear",
    "luffy_on_policy method.demonstration_share=0.5": r"with method\.num_demonstrations=0; leave it at 1",
    "luffy_on_policy method.prefix_strategy=linear": r"with method\.num_demonstrations=0; leave it at random",
    "luffy_on_policy method.off_shape=logp": r"with method\.num_demonstrations=0",
    "luffy_rl_sft method.off_shape=logp": r"with method\.sft_coef, .* leave it at p_div_p",
    "luffy_rl_sft method.prefix_advantage=1": r"with method\.sft_coef, .* leave it at null",
    "luffy_rl_sft method.off_options.gamma=0.3": r"with method\.sft_coef; remove it",
    "luffy method.demonstration_probs=x method.off_shape=logp": r"with method\.demonstration_probs, whose ratio is exact",
    "luffy method.demonstration_probs=x method.off_options.gamma=0.3": r"with method\.off_shape=none; remove it",
    "luffy method.prefix_advantage=1 method.off_advantage_scale=2": r"with method\.prefix_advantage; leave it at 1",
    "luffy method.off_options.weight=0.2": r"with method\.off_shape=p_div_p; remove it",
    "luffy method.off_shape=logp method.off_options.exponent=2": r"with method\.off_shape=logp; remove it",
    "luffy method.on_options.gamma=0.3": r"with method\.on_shape=none; remove it",
    "exgrpo method.on_shape=logp method.on_options.weight=0.3": r"with method\.on_shape=logp; remove it",
    "exgrpo method.pick_by=random method.pick=max": r"with method\.pick_by=random; leave it at min",
    "exgrpo method.replay_share=0 method.buckets=none": r"with method\.replay_share=0: nothing is replayed; leave it at normal",
    "bupo_grpo method.internal_norm=final": r"with method\.phase_one_steps=0; leave it at none",
    "classmate method.normalize_answer=true": r"with method\.advantage=classmate_with; leave it at false",
    "classmate_baseline method.classmate_samples=2": r"with method\.condition=no_classmate: nobody is asked; leave it at 1",
    "classmate_baseline method.classmate_shares=[2.5]": r"with method\.condition=no_classmate: nobody is asked; leave it at \[\]",
    "classmate_baseline method.consistency_weight=0.1": r"with method\.condition=no_classmate: nobody is asked; leave it at 0",
    "classmate method.classmate_temperature=0 method.classmate_top_p=0.5": r"with method\.classmate_temperature=0; leave it at 1",
}


# The same settings where something reads them, or at their defaults.
WITH_EFFECT = [
    "grpo_passk method.normalize_by_std=false",
    "grpo method.advantage=grpo_split method.normalize_by_std=false",
    "classmate method.normalize_by_std=true",
    "classmate_gdpo method.normalize_answer=true",
    "ppo method.normalize_by_std=true method.kl_estimator=k3 rollout.max_gap=0",
    "grpo rollout.max_gap=0.5 cluster.backend=process cluster.engine_apart=true",
    "grpo rollout.max_gap=0.5 rollout.engine=http",
    "grpo rollout.max_gap=0.5 cluster.backend=ray cluster.engines=1",
    "sft method.validate_accuracy=true data.validation=arithmetic:1:digits:test",
    "luffy method.prefix_strategy=linear method.prefix_peak=0.5 method.prefix_steps=10",
    "luffy method.prefix_strategy=linear_max method.prefix_shared=true method.prefix_steps=10",
    "luffy method.prefix_min=0.1 method.prefix_max=0.5 method.prefix_shared=true",
    "luffy method.off_shape=logp method.off_options.weight=0.2",
    "luffy method.off_shape=pow method.off_options.exponent=2 method.off_options.max_value=1",
    "luffy method.on_shape=p_div_p method.on_options.gamma=0.3 method.prefix_advantage=1",
    "luffy method.demonstration_probs=x method.off_options.max_value=2",
    "exgrpo method.pick_by=perplexity method.pick=max method.buckets=none",
    "bupo method.internal_norm=final",
    "classmate_think method.condition=no_classmate",
    "classmate_self method.condition=no_classmate",
    # what the recipe itself sets may be switched off as a whole
    "reinforce_pp method.kl=none",
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
    record_overrides(config, list(overrides))
    find_method(config.method.name)(config).check()


@pytest.mark.parametrize("overrides", WITH_EFFECT)
def test_a_setting_passes_where_it_is_read(overrides, tiny):
    check_quickly(overrides.split()[0], tiny, *overrides.split()[1:])


@pytest.mark.parametrize("overrides", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_by_its_name(overrides, tiny):
    recipe, *given = overrides.split()
    with pytest.raises(ConfigError) as caught:
        check_quickly(recipe, tiny, *given)
    line = str(caught.value)
    assert line.startswith(f"{given[-1]} has no effect ") and "\n" not in line, line
    assert re.search(WITHOUT_EFFECT[overrides], line), line


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_fix_in_one_line(name, tiny):
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        check(overrides.split()[0], tiny, *overrides.split()[1:])
    assert "\n" not in str(caught.value)


def test_a_refused_run_writes_nothing(tiny, tmp_path):
    config = config_of("grpo", tiny, *SMALL, "method.advantage=gae", f"runs={tmp_path}")
    with pytest.raises(ConfigError):
        train(config, Reporter())
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_allowed_as_it_is(recipe, tiny):
    check(recipe, tiny)


ALLOWED = [
    "remax rollout.samples=1",
    "reinforce_pp rollout.samples=1",
    "ppo rollout.samples=1",
    "grpo method.kl=reward method.kl_target=0.1 method.kl_estimator=k1",
    "grpo method.kl=loss method.kl_estimator=k1+",
    "grpo method.kl=loss method.kl_estimator=abs+",
    "grpo method.loss=dro method.loss_options.beta=0.5",
    "grpo method.loss=sapo method.loss_options.temperature_negative=1.1",
    "grpo method.loss=dppo_tv method.loss_options.max_ratio=3 method.clip_low=0.1",
    "grpo method.clip_low=inf method.clip_high=inf",
    f"grpo method.overlong_buffer={LIMIT}",
    "grpo method.correction=sequence method.correction_bound='0.5_5' method.rejection.seq_mean_k1='0.5_2.0'",
    "grpo method.correction=token method.rejection.token_k2=0.3",
    "grpo method.advantage=grpo_split",
    "grpo method.advantage=tir_optimal_token_baseline",
    "gdpo method.kl=loss",
    "dpo method.label_smoothing=0.1",
    "sft rollout.top_p=0.9",
    "dpo rollout.top_p=0.9",
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_possible_combinations_are_allowed(overrides, tiny):
    check(overrides.split()[0], tiny, *overrides.split()[1:])
