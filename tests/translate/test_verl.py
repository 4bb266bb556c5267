"""`postgrad import` of scripts of verl and its forks: the command, and what has no equivalent."""

import pytest
from imported import keys, printed, script, translated
from tables import table, tabled

from postgrad.translate import defaults_of, translate

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

SCRIPT = script("verl_script")


def test_a_script_of_verl(tmp_path, capsys):
    result = translated(SCRIPT)
    assert result.recipe == "grpo"
    assert result.overrides == {
        "data.train": "$HOME/gsm8k/train.parquet",
        "training.problems_per_step": "1024",
        "rollout.max_response_tokens": "2048",
        "data.overlong": "drop",
        "model.path": "Qwen/Qwen2-7B-Instruct",
        "optimizer.lr": "1e-6",
        "training.updates_per_step": "4",
        "method.kl": "loss",
        "method.kl_coef": "0.001",
        "method.kl_estimator": "k3",
        "rollout.samples": "5",
        "cluster": "ray",
        "cluster.workers": "16",
        "training.epochs": "15",
    }
    assert result.missing == ["reward_model.strange=1"]
    assert "\n# no equivalent: reward_model.strange=1\n" in printed(SCRIPT, tmp_path, capsys)


# (arguments, overrides, settings without an equivalent)
CASES = table(__file__, "verl")


@pytest.mark.parametrize(("arguments", "overrides", "missing"), CASES)
def test_settings_of_verl(arguments, overrides, missing, tmp_path, capsys):
    group = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=8"
    command = f"python3 -m verl.trainer.main_ppo {group} {arguments}"
    result = translated(command)
    assert (result.recipe, result.overrides) == ("grpo", overrides | {"rollout.samples": "8"})
    assert keys(result.missing) == sorted(missing)
    printed(command, tmp_path, capsys)


@tabled("arguments, recipe, overrides")
def test_forks_and_critics_have_their_recipes(arguments, recipe, overrides, tmp_path, capsys):
    command = f"python3 -m verl.trainer.main_ppo {arguments}"
    result = translated(command)
    assert (result.recipe, result.overrides) == (recipe, overrides)
    assert keys(result.missing) in ([], ["the reward of this data set"])
    printed(command, tmp_path, capsys)


@tabled("settings, key")
def test_what_a_recipe_does_not_do_is_listed(settings, key):
    (line,) = translate("verl", settings).missing
    assert key in line.partition("=")[0]


def test_the_reward_of_an_unknown_judge_is_to_be_set():
    settings = {
        "algorithm.adv_estimator": "grpo_w_classmate",
        "reward_model.classmate_batch_size": "null",
        "reward_model.llm_judge_model_name": "org/rm",
        "reward_model.llm_judge_backend_type": "tinker",
    }
    lines = translate("verl", settings).missing
    assert any("reward.verifier" in line for line in lines)
    assert any("llm_judge_model_name=org/rm" in line for line in lines)


SFT = script("verl_sft")


def test_an_sft_script_of_verl_is_no_ppo(tmp_path, capsys):
    result = translated(SFT)
    columns = ":extra_info.question=prompt:extra_info.answer=response"
    assert (result.recipe, result.missing) == ("sft", ["data.strange=1"])
    assert result.overrides == {
        "data.train": f"a.parquet{columns}",
        "data.validation": f"b.parquet{columns}",
        "training.problems_per_step": "64",
        "model.path": "org/m",
        "optimizer.lr": "1e-4",
        "optimizer.betas": "[0.9,0.95]",
        "optimizer.schedule": "cosine",
        "training.epochs": "3",
    }
    assert "optimizer.warmup_steps=0.1" in printed(SFT, tmp_path, capsys)


@tabled("settings, overrides, missing")
def test_settings_of_sft_of_verl(settings, overrides, missing):
    result = translate("verl_sft", settings)
    assert (result.recipe, result.overrides) == ("sft", overrides)
    assert keys(result.missing) == missing


def test_defaults_of_verl_are_part_of_the_command(tmp_path, capsys):
    """verl's defaults: 1,024 problems, one response, 4 updates of 256, 512 tokens, 30 epochs."""
    out = printed(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m "
        "actor_rollout_ref.model.lora_rank=8 data.train_files=a.parquet",
        tmp_path,
        capsys,
    )
    assert set(out.replace("\\\n", " ").partition("#")[0].split()) == {
        *("postgrad", "train", "ppo", "model.path=m", "model.lora.rank=8", "data.train=a.parquet"),
        *("training.problems_per_step=1024", "training.updates_per_step=4", "rollout.samples=1"),
        *("rollout.max_response_tokens=512", "training.epochs=30", "model.lora.alpha=16"),
    }


def test_defaults_follow_what_the_script_sets():
    assert defaults_of("verl", "luffy", {}) == {}  # the recipe has the fork's values
    small = defaults_of("verl", "grpo", {"training.problems_per_step": "128"})
    assert small["training.updates_per_step"] == "1"
    assert "training.validation_temperature" not in small
    gspo = {"method.loss": "gspo", "method.kl": "none", "training.steps": "9"}
    assert not {"training.epochs"} & defaults_of("verl", "grpo", gspo).keys()
