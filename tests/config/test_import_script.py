"""`postgrad import`: scripts of verl, LUFFY, BuPO and TRL become commands that pass the checks."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_defaults import defaults_of
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
                  beta=0.04, adam_beta2=0.95, adam_epsilon=1e-6, strange="yes")
"""


PF_PPO = (
    "algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method={} algorithm.pf_ppo.weight_pow=3"
)


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (PF_PPO.format("pow"), {"method.resample": "pow", "method.resample_power": "3"}),
        (PF_PPO.format("max_min"), {"method.resample": "max_min"}),
        ("algorithm.use_pf_ppo=True", {"method.resample": "pow"}),
        (PF_PPO.format("pow").replace("True", "False"), {}),
        (PF_PPO.format("pow") + " algorithm.adv_estimator=grpo", {}),  # verl reads it with GAE only
    ],
)
def test_rows_of_pf_ppo_are_drawn_anew(words, overrides):
    result = translate(*read_settings(f"python3 -m verl.trainer.main_ppo {words}"))
    found = {name: value for name, value in result.overrides.items() if "resample" in name}
    assert found == overrides and not any("pf_ppo" in line for line in result.missing)


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


@pytest.mark.parametrize(
    ("value", "overrides", "missing"),
    [
        ('["wandb"]', {"track": "wandb"}, []),
        ('"tensorboard"', {"track": "tensorboard"}, []),
        ('["none"]', {}, []),
        ("[]", {}, []),
        ('["wandb", "tensorboard"]', {"track": "[wandb,tensorboard]"}, []),
        ('["tensorboard", "mlflow"]', {"track": "tensorboard"}, ["report_to"]),
        ('["mlflow", "comet_ml"]', {}, ["report_to"]),
        ('"mlflow"', {}, ["report_to"]),
    ],
)
def test_report_to_of_trl_is_the_tracker(value, overrides, missing):
    script = f"GRPOConfig(report_to={value}, use_vllm=True, vllm_mode='server')"
    result = translate(*read_settings(script))
    assert result.overrides == overrides
    assert [line.split("=")[0] for line in result.missing] == missing


def test_several_loggers_of_verl_are_trackers():
    verl = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.logger="
    loggers = """'["console","wandb","tensorboard","swanlab"]'"""
    assert translate(*read_settings(verl + loggers)).overrides["track"] == "[wandb,tensorboard]"
    assert "track" not in translate(*read_settings(f"{verl}console")).overrides


@pytest.mark.parametrize(
    ("arguments", "prompt_tokens"), [("", "2048"), (", max_prompt_length=512", "512")]
)
def test_max_length_of_trl_limits_prompts_too(arguments, prompt_tokens):
    call = f"DPOConfig(max_length=2048, save_total_limit=2{arguments})"
    result = translate(*read_settings(call))
    assert result.overrides == {
        "rollout.max_response_tokens": "2048",
        "data.max_prompt_tokens": prompt_tokens,
        "training.keep_checkpoints": "2",
    }
    [line] = result.missing
    assert line.startswith("max_length=2048: ") and "data.overlong=drop" in line


@pytest.mark.parametrize(
    ("flag", "every"), [("--sync_ref_model", "64"), ("--sync_ref_model false", None)]
)
def test_a_flag_alone_switches_on_a_reference_that_follows_the_policy(flag, every):
    text = f"trl dpo --model_name_or_path m {flag} --ref_model_sync_steps 64"
    result = translate(*read_settings(text))
    assert result.overrides.get("method.reference_sync_every") == every
    assert not result.missing


def test_a_chat_template_of_trl_has_a_reason():
    result = translate(*read_settings("GRPOConfig(chat_template_path='x')"))
    [line] = result.missing
    assert line.startswith("chat_template_path=x: the chat template")


def test_trl_config():
    result = translate(*read_settings(TRL))
    assert result.recipe == "grpo" and result.missing == ["strange=yes"]
    assert result.overrides["training.ppo_epochs"] == "2"
    assert result.overrides["method.kl_coef"] == "0.04"
    assert result.overrides["optimizer.betas"] == "[0.9,0.95]"
    assert result.overrides["optimizer.eps"] == "1e-06"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "recipe", "overrides"),
    [
        ("KTOConfig(beta=0.2, bf16=True)", "kto", {"method.beta": "0.2"}),
        ("RewardConfig(learning_rate=0.1)", "reward_model", {"optimizer.lr": "0.1"}),
        ("DPOConfig(loss_type='ipo')", "dpo", {"method.loss": "ipo"}),
        (
            "DPOConfig(sync_ref_model=True)",
            "dpo",
            {"method.reference_sync_every": "512", "method.reference_mixup": "0.6"},
        ),
        (  # counted in updates there, of which a step has two
            "GRPOConfig(beta=0.01, sync_ref_model=True, ref_model_sync_steps=64, "
            "ref_model_mixup_alpha=1.0, per_device_train_batch_size=8, num_iterations=2)",
            "grpo",
            {
                "training.problems_per_step": "1",
                "training.ppo_epochs": "2",
                "method.kl": "loss",
                "method.kl_coef": "0.01",
                "method.kl_ratio": "true",
                "method.reference_sync_every": "32",
                "method.reference_mixup": "1.0",
            },
        ),
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
    (line,) = result.missing
    assert result.recipe == "grpo" and line.startswith("reward_funcs=['accuracy']: ")
    assert result.overrides == {
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.train": "hub:open-r1/OpenR1-Math",
        "rollout.samples": "16",
        "optimizer.lr": "2e-05",
        "optimizer.schedule": "cosine",
        "training.steps": "5",
    }


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


@pytest.mark.parametrize(
    ("settings", "overrides", "missing"),
    [
        (
            {
                "actor.megatron.tensor_model_parallel_size": "4",
                "ref.megatron.tensor_model_parallel_size": "4",
                "actor.megatron.expert_model_parallel_size": "2",
                "rollout.tensor_model_parallel_size": "2",
            },
            {"cluster.tensor_parallel": "4", "cluster.expert_parallel": "2"},
            [],
        ),
        (
            {
                "actor.ulysses_sequence_parallel_size": "2",
                "ref.ulysses_sequence_parallel_size": "4",
                "actor.megatron.context_parallel_size": "2",
                "actor.megatron.pipeline_model_parallel_size": "1",
                "actor.megatron.virtual_pipeline_model_parallel_size": "null",
            },
            {"cluster.sequence_parallel": "2"},
            ["ref.ulysses_sequence_parallel_size=4", "actor.megatron.context_parallel_size=2"],
        ),
    ],
)
def test_sizes_that_divide_a_model_are_settings_or_listed(settings, overrides, missing):
    given = {f"actor_rollout_ref.{key}": value for key, value in settings.items()}
    result = translate("verl", given | {"algorithm.adv_estimator": "grpo"})
    assert result.overrides == overrides
    lines = [line.removeprefix("actor_rollout_ref.").partition(":")[0] for line in result.missing]
    assert lines == missing
    sft = translate("verl_sft", {"engine.tensor_model_parallel_size": "2", "engine.x": "1"})
    assert sft.overrides == {"cluster.tensor_parallel": "2"}


VERL_SFT = """
nproc=2
torchrun --nproc_per_node=$nproc -m verl.trainer.fsdp_sft_trainer \\
  data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=64 \\
  data.prompt_key=extra_info data.response_key=extra_info \\
  +data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
  data.micro_batch_size_per_gpu=4 model.partial_pretrain=org/m optim.lr=1e-4 \\
  optim.betas=[0.9,0.95] optim.lr_scheduler=cosine trainer.total_epochs=3 \\
  trainer.total_training_steps=null trainer.logger=console data.strange=1 $@
"""


def test_an_sft_script_of_verl_is_no_ppo(tmp_path, capsys):
    result = translate(*read_settings(VERL_SFT))
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
    script = tmp_path / "run.sh"
    script.write_text(VERL_SFT)
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert "needs a change" not in out and "optimizer.warmup_ratio=0.1" in out, out


RL = "algorithm.adv_estimator=grpo data.train_batch_size=8"


@pytest.mark.parametrize(
    "script",
    [
        "python3 -m verl.trainer.main_generation data.path=a rollout.temperature=1",
        "python3 -m verl.trainer.main_eval data.path=a",
        "python3 src/inference_main_model.py model_args.name=a",
        f"python3 -m verl.trainer.main_ppo {RL}\npython3 -m verl.trainer.main_ppo {RL}",
        f"python3 -m verl.experimental.vla.main_ppo {RL}",
        "GRPOConfig(beta=0.1)\nSFTConfig(learning_rate=1.0)",
    ],
)
def test_what_is_no_single_training_is_refused(script):
    with pytest.raises(ConfigError):
        read_settings(script)


def test_programs_and_variables_that_change_the_meaning_are_listed():
    script = (
        "if [ $1 ]; then lr=1e-6\nelse\nlr=2e-6\nfi\n"
        "python3 data.py data.local_dir=x\n"
        f"python3 -m recipe.spin.main_spin {RL} actor_rollout_ref.actor.optim.lr=$lr"
    )
    result = translate(*read_settings(script))
    assert result.overrides == {"training.problems_per_step": "8", "optimizer.lr": "2e-6"}
    assert [line.split(":")[0] for line in result.missing] == ["$lr", "recipe.spin.main_spin"]
    script = f"python3 -m verl.experimental.one_step_off_policy.main_ppo {RL}"
    assert "rollout.staleness=1" in translate(*read_settings(script)).missing[0]


def test_variables_of_a_shell():
    script = (
        'root=${ROOT:-"${HOME}/data"}\nfile="${root}"/a.parquet\ngpus=4\nper=8\n'
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$file "
        "data.train_batch_size=$(((gpus + 4) * per)) actor_rollout_ref.rollout.n=$(( per % 3 ))"
    )
    overrides = translate(*read_settings(script)).overrides
    assert overrides["data.train"] == "${HOME}/data/a.parquet"
    assert overrides["training.problems_per_step"] == "64"
    assert overrides["rollout.samples"] == "2"


def test_columns_rewards_and_validation_of_verl():
    settings = {
        "data.train_files": "a.parquet",
        "data.prompt_key": "question",
        "data.reward_fn_key": "source",
        "reward_model.enable": "True",
        "reward_model.model.path": "org/rm",
        "reward_model.reward_manager": "batch",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "0.6",
        "actor_rollout_ref.rollout.val_kwargs.do_sample": "False",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "2",
        "algorithm.adv_estimator": "grpo",
        "trainer.total_epochs": "15",
        "trainer.total_training_steps": "7",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.clip_ratio_c": "10.0",
    }
    result = translate("verl", settings)
    assert result.overrides == {
        "data.train": "a.parquet:question=prompt:source=data_source",
        "reward.verifier": "model:org/rm",
        "training.validation_temperature": "0",
        "training.steps": "7",
        "method.loss": "gspo",
        "method.clip_low": "0.2",
        "method.clip_high": "0.2",
        "method.aggregation": "seq-mean-token-mean",
    }
    assert [line.partition(":")[0] for line in result.missing] == [
        "reward_model.reward_manager=batch",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    ]


def test_scaled_coefficients_of_luffy_are_those_of_the_recipe():
    """Their literal values would be another loss: the recipes' comments explain the scale."""
    actor = "actor_rollout_ref.actor"
    settings = {f"{actor}.use_off_policy_loss": "True", f"{actor}.entropy_coeff": "0.001"}
    result = translate("verl", settings | {f"{actor}.grad_clip": "1.0"})
    assert (result.recipe, result.overrides, result.missing) == ("luffy", {}, [])
    (line,) = translate("verl", settings | {f"{actor}.grad_clip": "2.0"}).missing
    assert line.startswith(f"{actor}.grad_clip=2.0")
    exgrpo = {"trainer.exp_metric": "ent", f"{actor}.loss_remove_clip": "True"}
    assert translate("verl", exgrpo).overrides == {}  # the clip stays until the replay starts


def test_classmate_settings_and_rewards():
    reward = "reward_model"
    settings = {
        "algorithm.adv_estimator": "grpo_main_classmate_separated",
        "data.train_files": "['data/confidence/train.parquet']",
        f"{reward}.think_start_str": "<think>",
        f"{reward}.classmate_cot_reward_configs.classmate_reward_type": "vanilla_reward",
        f"{reward}.classmate_cot_reward_configs.token_level_classmate_reward_mode": "all",
        f"{reward}.llm_judge_model_name": "org/rm",
        f"{reward}.llm_judge_backend_type": "hf_scoring",
    }
    result = translate("verl", settings)
    assert (result.recipe, result.missing) == ("classmate_think", [])
    assert result.overrides == {
        "data.train": "data/confidence/train.parquet",
        "method.advantage": "classmate_separated",
        "method.cot_start": "<think>",
        "method.reward_type": "vanilla",
        "method.classmate_tokens": "all",
        "reward.verifier": "model:org/rm",
    }
    settings[f"{reward}.llm_judge_backend_type"] = "tinker"
    assert any("reward.verifier" in line for line in translate("verl", settings).missing)
    baseline = {
        f"{reward}.think_start_str": "<t>",
        f"{reward}.token_level_main_reward_mode": "cot_only",
    }
    result = translate("verl", baseline | {"algorithm.adv_estimator": "grpo"})
    assert (result.recipe, result.overrides["method.main_tokens"]) == (
        "classmate_baseline",
        "cot_only",
    )


def test_batches_and_clips_of_trl():
    call = (
        "GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, "
        "steps_per_generation=4, num_generations=4, epsilon=0.3, max_steps=-1, delta=None)"
    )
    result = translate(*read_settings(call))
    assert result.missing == []
    assert result.overrides == {
        "training.problems_per_step": "8",
        "training.updates_per_step": "2",
        "rollout.samples": "4",
        "method.clip_low": "0.3",
        "method.clip_high": "0.3",
    }
    command = "accelerate launch trl sft --model_name_or_path m --completion_only_loss True \\\n"
    result = translate(*read_settings(command + "  --learning_rate 1e-5 --max_steps 9"))
    assert (result.recipe, result.missing) == ("sft", [])
    assert result.overrides == {
        "model.path": "m",
        "optimizer.lr": "1e-5",
        "training.steps": "9",
    }


@pytest.mark.parametrize(
    ("arguments", "problems", "updates", "missing"),
    [
        # 64 responses of 16 problems; 8 micro-batches of 8 rows, 2 per update
        ("gradient_accumulation_steps=2, generation_batch_size=64", 16, 4, 1),
        ("gradient_accumulation_steps=8, generation_batch_size=64", 16, 1, 0),
        ("gradient_accumulation_steps=2, steps_per_generation=None", 4, 1, 0),
        # four generations per update: as one of 32 responses, unless each is repeated
        ("gradient_accumulation_steps=4, steps_per_generation=1", 8, 1, 0),
        ("gradient_accumulation_steps=4, generation_batch_size=8", 8, 1, 0),
        ("gradient_accumulation_steps=4, steps_per_generation=1, num_iterations=2", 2, 1, 1),
        # an update of the end of one generation and the start of the next
        ("gradient_accumulation_steps=2, steps_per_generation=3", 6, 1, 1),
        # 2 problems in 8 updates: an update has a quarter of a problem's responses
        ("num_generations=32, steps_per_generation=8", 2, 2, 1),
        # TRL refuses both arguments, and a part of a micro-batch
        ("steps_per_generation=2, generation_batch_size=16", None, None, 3),
        ("generation_batch_size=20", None, None, 2),
    ],
)
def test_generations_of_trl_are_steps(arguments, problems, updates, missing):
    samples = "" if "num_generations" in arguments else "num_generations=4, "
    call = f"GRPOConfig(per_device_train_batch_size=8, {samples}{arguments})"
    result = translate(*read_settings(call))
    found = result.overrides.get("training.problems_per_step")
    assert found == (problems and str(problems))
    assert int(result.overrides.get("training.updates_per_step", 1)) == (updates or 1)
    assert len(result.missing) == missing
    given = [word for word in arguments.split(", ") if "generation" in word]
    assert not missing or any(line.startswith(given[-1]) for line in result.missing)


def test_steps_of_trl_are_updates():
    """2 updates per pass, 3 passes: 6 updates per step."""
    call = (
        "GRPOConfig(per_device_train_batch_size=8, num_generations=4, steps_per_generation=2, "
        "num_iterations=3, max_steps=60, save_steps=20, warmup_steps=6)"
    )
    result = translate(*read_settings(call))
    assert result.missing == []
    assert result.overrides["training.steps"] == "10"
    assert result.overrides["training.checkpoint_every"] == "4"
    assert result.overrides["optimizer.warmup_steps"] == "1"
    result = translate(*read_settings("GRPOConfig(num_iterations=0, max_steps=60)"))
    assert result.overrides["training.steps"] == "60"
    result = translate(*read_settings(call.replace("max_steps=60", "max_steps=61")))
    assert result.overrides["training.steps"] == "11"
    assert [line.partition(":")[0] for line in result.missing] == ["max_steps=61"]


def test_defaults_of_the_project_are_part_of_the_command(tmp_path, capsys):
    """verl's defaults: 1,024 problems, one response, 4 updates of 256, 512 tokens, 30 epochs."""
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m "
        "actor_rollout_ref.model.lora_rank=8 data.train_files=a.parquet"
    )
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    words = set(out.replace("\\\n", " ").partition("#")[0].split())
    assert words == {
        *("postgrad", "train", "ppo", "model.path=m", "model.lora.rank=8", "data.train=a.parquet"),
        *("training.problems_per_step=1024", "training.updates_per_step=4", "rollout.samples=1"),
        *("rollout.max_response_tokens=512", "training.epochs=30", "model.lora.alpha=16"),
    }


def test_a_list_of_files_is_one_value(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=[a,b] "
        "actor_rollout_ref.rollout.n=4"
    )
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert " data.train=a,b " in out and "needs a change" not in out, out


def test_defaults_follow_what_the_script_sets():
    """Worked out by hand: 8 responses per step are 2 problems with 4 samples."""
    grpo = {"rollout.samples": "4", "method.loss": "gspo", "training.steps": "9"}
    values = defaults_of("GRPOConfig", "grpo", grpo)
    assert values["training.problems_per_step"] == "2"
    assert not {"method.dual_clip", "training.epochs", "rollout.samples"} & values.keys()
    rloo = defaults_of("RLOOConfig", "rloo", {"method.kl": "none"})
    assert not [key for key in rloo if key.startswith("method.kl")]
    assert defaults_of("verl", "luffy", {}) == {}  # the recipe has the fork's values
    with_kl = defaults_of("GRPOConfig", "grpo", {"method.kl": "loss"})
    assert with_kl["method.kl_ratio"] == "true"  # use_bias_correction_kl
    small = defaults_of("verl", "grpo", {"training.problems_per_step": "128"})
    assert small["training.updates_per_step"] == "1"
    assert "training.validation_temperature" not in small


HYDRA = (
    'DIR="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$DIR/config" \\\n'
    "  --config-name='mine' algorithm.adv_estimator=grpo data.train_batch_size=8"
)


def test_settings_of_a_config_file_of_verl_are_read_or_listed(tmp_path):
    result = translate(*read_settings(HYDRA))
    assert result.overrides == {"training.problems_per_step": "8"}
    (line,) = result.missing
    assert line.startswith("--config-path=$(pwd)/config --config-name=mine: ")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "hydra: {searchpath: [a]}\ndefaults: [ppo_trainer, other, _self_]\n"
        "data: {train_batch_size: 4, max_response_length: 64, train_files: [a, b]}\n"
        "actor_rollout_ref: {rollout: {n: 5}, actor: {optim: {lr: 1e-5}}}\n"
        "trainer: {total_training_steps: null, total_epochs: '${actor_rollout_ref.rollout.n}'}\n"
    )
    result = translate(*read_settings(HYDRA, folder=tmp_path))
    assert result.overrides == {
        "training.problems_per_step": "8",  # of the command line
        "rollout.max_response_tokens": "64",
        "data.train": "a,b",
        "rollout.samples": "5",
        "optimizer.lr": "1e-5",
        "training.epochs": "5",
    }
    assert [line.split(":")[0] for line in result.missing] == ["defaults of config/mine.yaml"]


@pytest.mark.parametrize(
    ("options", "num_lines"),
    [
        ("--config-path=./config --config-name='ppo_megatron_trainer.yaml'", 0),
        ("--config-name=ppo_trainer", 0),
        ("--config-path . --config-name mine", 1),
        ("-cn mine", 1),
    ],
)
def test_config_files_of_verl_itself_have_its_defaults(options, num_lines):
    script = f"python3 -m verl.trainer.main_ppo {options} algorithm.adv_estimator=grpo"
    assert len(translate(*read_settings(script)).missing) == num_lines
    if num_lines:
        with pytest.raises(ConfigError, match="mine"):
            read_settings(f"python3 -m verl.trainer.main_ppo {options}")
