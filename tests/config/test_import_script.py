"""`postgrad import`: scripts of verl, LUFFY, BuPO and TRL become commands that pass the checks."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError

VERL = """
set -x
n=5
len=$((1024 * 2))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/gsm8k/train.parquet \\
    data.train_batch_size=1024 \\
    data.max_response_length=${len} \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.rollout.n=$n \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2 \\
    trainer.save_freq=-1 \\
    trainer.total_epochs=15 \\
    +reward_model.strange=1 $@
"""
LUFFY = """
python3 -m verl.mix_src.main_mix_ppo data.train_batch_size=128 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.max_prefix_ratio=1.0 \\
  actor_rollout_ref.actor.use_off_policy_loss=True \\
  actor_rollout_ref.actor.off_policy_reshape="p_div_p_0.1" algorithm.adv_estimator=grpo
"""
TRL = """
from trl import GRPOConfig
args = GRPOConfig(output_dir="out", learning_rate=1e-5, num_generations=8, num_iterations=2,
                  beta=0.04, vllm_mode="colocate")
"""


def test_verl_script():
    result = translate(*read_settings(VERL))
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


def test_forks_have_their_recipes():
    luffy = translate(*read_settings(LUFFY))
    assert luffy.recipe == "luffy" and luffy.overrides["method.off_options.gamma"] == "0.1"
    bupo = translate("verl", {"actor_rollout_ref.actor.internal_layer": "5"})
    assert (bupo.recipe, bupo.overrides) == ("bupo", {"method.num_blocks": "6"})
    syc = {"reward_model.classmate_batch_size": "32", "algorithm.adv_estimator": "gdpo"}
    assert translate("verl", syc).recipe == "classmate_gdpo"
    assert translate("verl", {"algorithm.adv_estimator": "gae"}).recipe == "ppo"


def test_trl_config():
    result = translate(*read_settings(TRL))
    assert result.recipe == "grpo" and result.missing == ["vllm_mode=colocate"]
    assert result.overrides["training.ppo_epochs"] == "2"
    assert result.overrides["method.kl_coef"] == "0.04"


@pytest.mark.parametrize("text", [VERL, LUFFY, TRL])
def test_printed_command_passes_the_checks(text, tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("postgrad train ") and "needs a change" not in out, out


def test_text_without_settings_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        read_settings("echo hello")
    assert main(["import", str(tmp_path / "missing.sh")]) == 2


@pytest.mark.parametrize(("top_k", "expected"), [("-1", {}), ("20", {"rollout.top_k": "20"})])
def test_truncated_sampling_and_sequence_parallelism_of_verl(top_k, expected):
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        f"actor_rollout_ref.rollout.top_p=0.9 actor_rollout_ref.rollout.top_k={top_k} "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    )
    result = translate(*read_settings(script))
    shared = {"rollout.top_p": "0.9", "cluster.sequence_parallel": "2"}
    assert result.overrides == shared | expected
    assert not result.missing
