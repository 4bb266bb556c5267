"""`postgrad import` of the originals' scripts, shortened: the printed command runs as it is."""

import shlex
import subprocess

import pytest
from imported import script
from tables import tabled

from postgrad.cli.main import main
from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.translate import read_settings, translate

BUPO = script("bupo")
PHASES = (
    (
        "actor_rollout_ref.actor.internal_policy_interative=True "
        "actor_rollout_ref.actor.internal_layer=${{k}} actor_rollout_ref.actor.iterative_steps=30 "
        "actor_rollout_ref.model.override_config.internal_layer=${{k}}"
    )
    .replace("{{", "{")
    .replace("}}", "}")
)
QWEN = "data.prompt_template_type=qwen3_no_thinking"

CLASSMATE = script("classmate")


def _composed(text, capsys, tmp_path):
    """Return the configuration of the printed command, with its words as a shell gives them."""
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert "needs a change" not in out, out
    command = out.partition("\n#")[0].replace("postgrad train ", "printf '%s\\n' ", 1)
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    recipe, *overrides = words.stdout.splitlines()
    return recipe, compose(recipe, overrides, lambda name: find_method(name).Settings), out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kilotokens", "layer", "own", "recipe"),
    [
        (8, 5, f"{QWEN} {PHASES}", "bupo"),
        (3, 26, PHASES, "bupo"),
        (8, 5, QWEN, "grpo"),
        (3, 26, "", "grpo"),
    ],
)
def test_scripts_of_bupo(kilotokens, layer, own, recipe, capsys, tmp_path):
    text = BUPO.format(kilotokens=kilotokens, layer=layer, own=own)
    found, config, _ = _composed(text, capsys, tmp_path)
    assert found == recipe
    assert config.runs == f"./checkpoints/BuPO/modelname_bupo_{layer}layerpolicy"
    assert config.rollout.max_response_tokens == 1024 * kilotokens
    assert config.training.updates_per_step == 4
    assert config.method.aggregation == "token-mean"
    assert config.data.template_options == ({"enable_thinking": False} if QWEN in own else {})
    validation = config.data.validation
    files = ["your/data/path/aime_2024.parquet", "your/data/path/math500.parquet"]
    assert (validation if isinstance(validation, list) else validation.split(",")) == files
    if recipe == "bupo":
        assert (config.method.num_blocks, config.method.phase_one_steps) == (layer + 1, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "project", "dataset", "verifier"),
    [
        ("qwen_main_ppo", "mine", "helpful_instructions", "llm_judge"),
        ("main_ppo", "classmate_cot_w_verl", "anthropic_hh_rlhf", "llm_judge"),
        ("qwen_main_ppo", "classmate_cot_w_verl", "hendrycks_math_minimal", "auto"),
        ("qwen_main_ppo", "classmate_cot_w_verl", "mmlu_sycophancy_new", "auto"),
        ("main_ppo", "classmate_cot_w_verl", "confidence", None),
    ],
)
def test_warm_ups_and_baselines_of_classmate(program, project, dataset, verifier, capsys, tmp_path):
    text = CLASSMATE.format(program=program, project=project, dataset=dataset)
    recipe, config, out = _composed(text, capsys, tmp_path)
    assert recipe == "classmate_baseline"
    assert (config.method.condition, config.method.normalize_by_std) == ("no_classmate", False)
    assert config.method.aggregation == "seq-mean-token-sum-norm"
    assert config.runs == f"/out/{project}/{dataset}_grpo_warmup"
    if verifier is None:
        assert "# set it: the reward of this data set" in out
    else:
        assert config.reward.verifier == verifier
        assert ("# set it: the judge (reward.judge.model" in out) == (verifier == "llm_judge")


@tabled("value, printed")
def test_only_variables_of_the_shell_are_filled_in_when_the_command_is_pasted(value, printed):
    script = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    command = translate(*read_settings(f"{script} trainer.default_local_dir={value}")).command
    assert f"runs={printed}" in command.splitlines()[-1].strip()
    assert shlex.split(command)
