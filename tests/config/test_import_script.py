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


MORE_VERL = """
a=$HOME/a.parquet
train_files="['$a', 'b.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$train_files" \\
  data.train_batch_size=8 data.max_response_length=$((8192 / 2 - 1)) \\
  actor_rollout_ref.actor.optim.lr_warmup_steps=-1 trainer.critic_warmup=0 algorithm.lam=0.95 \\
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
  algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 \\
  algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2 \\
  reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 \\
  algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_final_reward \\
  custom_reward_function.path=r.py actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.actor.ppo_mini_batch_size=${unset} algorithm.kl_ctrl.horizon=5
"""


def test_verl_settings_that_depend_on_each_other():
    result = translate(*read_settings(MORE_VERL))
    assert result.overrides == {
        "data.train": "$HOME/a.parquet,b.parquet",
        "training.problems_per_step": "8",
        "rollout.max_response_tokens": "4095",
        "method.kl": "reward",
        "method.kl_estimator": "k1",  # verl's default in the reward, not that of the loss
        "method.kl_coef": "0.01",
        "method.kl_target": "0.2",
        "method.overlong_buffer": "64",
        "method.max_refills": "9",
        "method.refill_by": "reward",
        "reward.verifier": "r.py:compute_score",
    }
    # A variable without a value is no crash, and another horizon is no silent change.
    assert result.missing == [
        "actor_rollout_ref.actor.ppo_mini_batch_size=${unset}",
        "algorithm.kl_ctrl.horizon=5",
    ]


def test_straight_through_estimators_keep_their_plus():
    loss = {"actor_rollout_ref.actor.use_kl_loss": "True"}
    result = translate("verl", loss | {"actor_rollout_ref.actor.kl_loss_type": "low_var_kl+"})
    assert result.overrides["method.kl_estimator"] == "k3+"


@pytest.mark.parametrize(
    ("call", "recipe", "overrides"),
    [
        ("KTOConfig(beta=0.2, bf16=True)", "kto", {"method.beta": "0.2"}),
        ("ORPOConfig(beta=0.2)", "orpo", {"method.beta": "0.2"}),
        ("RewardConfig(learning_rate=0.1)", "reward_model", {"optimizer.lr": "0.1"}),
        ("PRMConfig(learning_rate=0.1)", "process_reward_model", {"optimizer.lr": "0.1"}),
        ("GKDConfig(beta=0.3)", "gkd", {"method.jsd_beta": "0.3"}),
        ("OnlineDPOConfig(beta=0.2)", "online_dpo", {"method.beta": "0.2"}),
        ("DPOConfig(loss_type='ipo')", "dpo", {"method.loss": "ipo"}),
        ("CPOConfig(loss_type='simpo', simpo_gamma=0.5)", "simpo", {"method.target_margin": "0.5"}),
        (
            "RLOOConfig(beta=0.05)",
            "rloo",
            {"method.kl": "reward", "method.kl_estimator": "k1", "method.kl_coef": "0.05"},
        ),
        (
            "GRPOConfig(loss_type='dr_grpo', scale_rewards=False, num_generations=4, "
            "per_device_train_batch_size=8, gradient_accumulation_steps=2)",
            "grpo",
            {
                "method.aggregation": "seq-mean-token-sum-norm",
                "method.normalize_by_std": "false",
                "rollout.samples": "4",
                "training.problems_per_step": "4",
            },
        ),
    ],
)
def test_configs_of_trl_have_their_recipes(call, recipe, overrides, tmp_path, capsys):
    result = translate(*read_settings(f"import trl\ntrl.{call}"))
    assert (result.recipe, result.overrides, result.missing) == (recipe, overrides, [])
    script = tmp_path / "run.py"
    script.write_text(f"import trl\ntrl.{call}")
    assert main(["import", str(script)]) == 0
    assert "needs a change" not in capsys.readouterr().out


def test_a_yaml_file_of_trl():
    text = (
        "# Model\nmodel_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\ntorch_dtype: bfloat16\n"
        "dataset_name: open-r1/OpenR1-Math\nnum_generations: 16\nlearning_rate: 2.0e-05\n"
        "lr_scheduler_type: cosine\nreward_funcs:\n- accuracy\nmax_steps: 5\nhub_id: null\n"
    )
    result = translate(*read_settings(text))
    assert (result.recipe, result.missing) == ("grpo", ["reward_funcs=['accuracy']"])
    assert result.overrides == {
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.train": "hub:open-r1/OpenR1-Math",
        "rollout.samples": "16",
        "optimizer.lr": "2e-05",
        "optimizer.schedule": "cosine",
        "training.steps": "5",
    }


def test_a_value_that_is_no_number_is_listed():
    result = translate(*read_settings("GRPOConfig(beta=args.beta, per_device_train_batch_size=b)"))
    assert result.missing == ["beta=args.beta", "per_device_train_batch_size=b"]


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
