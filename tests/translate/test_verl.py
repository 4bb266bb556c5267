"""`postgrad import` of scripts of verl and its forks: the command, and what has no equivalent."""

import pytest
from imported import keys, printed, translated

from postgrad.translate import defaults_of, translate

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
COT = "reward_model.classmate_cot_reward_configs"
MEAN_OF_ROWS = {"method.aggregation": "seq-mean-token-mean"}
CLIP = {"method.clip_low": "0.2", "method.clip_high": "0.2"}

SCRIPT = """
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
CASES = [
    # Losses: verl's bounds are 0.2 for all; ours are those of the papers.
    (f"{LOSS}.loss_mode=gspo", {"method.loss": "gspo", **CLIP, **MEAN_OF_ROWS}, []),
    (f"{LOSS}.loss_mode=geo_mean", {"method.loss": "geo_mean", **CLIP, **MEAN_OF_ROWS}, []),
    (f"{LOSS}.loss_mode=cispo", {"method.loss": "cispo", **CLIP}, []),
    (
        f"{LOSS}.loss_mode=cispo {ACTOR}.clip_ratio_low=10",
        {"method.loss": "cispo", **CLIP, "method.clip_low": "10"},
        [],
    ),
    (f"{LOSS}.loss_mode=clip_cov", {"method.loss": "clip_cov", **CLIP}, []),
    (
        f"{LOSS}.loss_mode=dppo_tv",
        {"method.loss": "dppo_tv", **CLIP, "method.loss_options.max_ratio": "3.0"},
        [],
    ),
    (
        f"{LOSS}.loss_mode=dppo_kl {ACTOR}.clip_ratio_c=20",
        {"method.loss": "dppo_kl", **CLIP, "method.loss_options.max_ratio": "20"},
        [],
    ),
    # They read neither clip nor dual clip.
    (
        f"{LOSS}.loss_mode=gpg {ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_c=5",
        {"method.loss": "gpg"},
        [],
    ),
    (
        f"{LOSS}.loss_mode=sapo {ACTOR}.clip_ratio_high=0.1 {ACTOR}.tau_pos=2.0 "
        f"{ACTOR}.tau_neg=3.0",
        {
            "method.loss": "sapo",
            **MEAN_OF_ROWS,
            "method.loss_options.temperature_positive": "2.0",
            "method.loss_options.temperature_negative": "3.0",
        },
        [],
    ),
    (
        f"{LOSS}.loss_mode=clip_cov {LOSS}.clip_cov_ratio=0.1 {LOSS}.clip_cov_ub=7",
        {
            "method.loss": "clip_cov",
            **CLIP,
            "method.loss_options.cov_share": "0.1",
            "method.loss_options.cov_high": "7",
        },
        [],
    ),
    (
        f"{LOSS}.loss_mode=kl_cov {LOSS}.kl_cov_ratio=0.1 {LOSS}.ppo_kl_coef=0.5",
        {
            "method.loss": "kl_cov",
            "method.loss_options.cov_share": "0.1",
            "method.loss_options.coefficient": "0.5",
        },
        [],
    ),
    (
        f"{LOSS}.loss_mode=dro {LOSS}.dro_beta=0.3",
        {"method.loss": "dro", "method.loss_options.beta": "0.3"},
        [],
    ),
    # verl's files list the options of all losses.
    (f"{LOSS}.loss_mode=gpg {LOSS}.dro_beta=null {ACTOR}.tau_pos=1.0", {"method.loss": "gpg"}, []),
    # An aggregation and a clip that verl does not read.
    (
        f"{LOSS}.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean",
        {"method.loss": "gspo", **CLIP, **MEAN_OF_ROWS},
        ["loss_agg_mode"],
    ),
    (
        f"{ACTOR}.clip_ratio=0.3",
        {"method.clip_low": "0.3", "method.clip_high": "0.3"},
        [f"{ACTOR}.clip_ratio"],
    ),
    (
        f"{ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_low=0.3 {ACTOR}.clip_ratio_high=0.3",
        {"method.clip_low": "0.3", "method.clip_high": "0.3"},
        [],
    ),
    (f"{LOSS}.loss_mode=new", {}, [f"{LOSS}.loss_mode"]),
    # Corrections, in any order of the settings; 2.0 is verl's bound.
    (
        f"{CORRECTION}.rollout_is_threshold=0.5_5.0 {CORRECTION}.rollout_is=token",
        {"method.correction": "token", "method.correction_bound": "0.5_5.0"},
        [],
    ),
    (
        f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_batch_normalize=True",
        {
            "method.correction": "sequence",
            "method.correction_bound": "2.0",
            "method.correction_normalize": "true",
        },
        [],
    ),
    # verl compares 1 / rho: 0.5 <= 1 / rho <= 4 is 0.25 <= rho <= 2.
    (
        f"{CORRECTION}.rollout_rs='seq_mean_k1,token_k2' "
        f"{CORRECTION}.rollout_rs_threshold='0.5_4.0,0.1'",
        {
            "method.correction": "rejection",
            "method.rejection.seq_mean_k1": "0.25_2.0",
            "method.rejection.token_k2": "0.1",
        },
        [],
    ),
    (
        f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_rs=token_k1 "
        f"{CORRECTION}.rollout_rs_threshold=2.0",
        {
            "method.correction": "token",
            "method.correction_bound": "2.0",
            "method.rejection.token_k1": "2.0",
        },
        [],
    ),
    # Bypass has no weights.
    (
        f"{CORRECTION}.bypass_mode=True {CORRECTION}.rollout_is=token "
        f"{CORRECTION}.loss_type=ppo_clip",
        {"method.correction": "bypass"},
        [],
    ),
    (f"{CORRECTION}.rollout_is=null {CORRECTION}.rollout_is_threshold=2.0", {}, []),
    (
        f"{CORRECTION}.bypass_mode=True {CORRECTION}.loss_type=reinforce "
        f"{CORRECTION}.rollout_rs=token_k1",
        {"method.correction": "bypass"},
        [f"{CORRECTION}.loss_type", f"{CORRECTION}.rollout_rs"],
    ),
    *(
        (
            f"{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold={bound}",
            {},
            [f"{CORRECTION}.rollout_rs"],
        )
        for bound in ("a_b", "0_2")
    ),
    # KL: verl's default in the reward is k1, not that of the loss.
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 "
        f"algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2 "
        f"{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_type=low_var_kl algorithm.kl_ctrl.horizon=5",
        {
            "method.kl": "reward",
            "method.kl_estimator": "k1",
            "method.kl_coef": "0.01",
            "method.kl_target": "0.2",
        },
        ["algorithm.kl_ctrl.horizon"],
    ),
    (
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=low_var_kl+ "
        "algorithm.use_kl_in_reward=True",
        {"method.kl": "loss", "method.kl_estimator": "k3+"},
        ["algorithm.use_kl_in_reward"],
    ),
    (f"{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.1", {"method.kl": "none"}, []),
    # DAPO
    (
        "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 "
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_final_reward",
        {
            "method.overlong_buffer": "64",
            "method.max_refills": "9",
            "method.refill_by": "reward",
        },
        [],
    ),
    (
        "reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=64 "
        "algorithm.filter_groups.enable=False",
        {},
        [],
    ),
    # Sampling and sizes
    (
        f"{ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=-1 {ACTOR}.ulysses_sequence_parallel_size=2",
        {"rollout.top_p": "0.9", "cluster": "ray", "cluster.sequence_parallel": "2"},
        [],
    ),
    (f"{ROLLOUT}.top_k=20", {"rollout.top_k": "20"}, []),
    (
        f"{ACTOR}.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 "
        f"{ACTOR}.megatron.expert_model_parallel_size=2 {ROLLOUT}.tensor_model_parallel_size=2",
        {"cluster": "ray", "cluster.tensor_parallel": "4", "cluster.expert_parallel": "2"},
        [],
    ),
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=2 "
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 "
        f"{ACTOR}.megatron.context_parallel_size=2 "
        f"{ACTOR}.megatron.pipeline_model_parallel_size=1 "
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=null",
        {"cluster": "ray", "cluster.sequence_parallel": "2"},
        [
            f"{ACTOR}.megatron.context_parallel_size",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        ],
    ),
    # Trackers
    (
        """trainer.logger='["console","wandb","tensorboard","swanlab"]'""",
        {"track": "[wandb,tensorboard]"},
        [],
    ),
    ("trainer.logger=console", {}, []),
    # Critics are read with GAE only.
    ("trainer.critic_warmup=0 algorithm.lam=0.95 critic.optim.lr=1e-5", {}, []),
    # Files, columns, rewards and validation
    ("data.train_files=[a,b]", {"data.train": "a,b"}, []),
    (
        "data.train_files=\"['a', 'b.parquet']\" custom_reward_function.path=r.py",
        {"data.train": "a,b.parquet", "reward.verifier": "r.py:compute_score"},
        [],
    ),
    (
        "data.train_files=a.parquet data.prompt_key=question data.reward_fn_key=source",
        {"data.train": "a.parquet:question=prompt:source=data_source"},
        [],
    ),
    (
        "reward_model.enable=True reward_model.model.path=org/rm reward_model.reward_manager=batch",
        {"reward.verifier": "model:org/rm"},
        ["reward_model.reward_manager"],
    ),
    (
        "reward_model.enable=True reward_model.model.path=org/rm custom_reward_function.path=r.py",
        {"reward.verifier": "r.py:compute_score"},
        ["reward_model.enable"],
    ),
    (
        f"data.val_files=a.parquet {ROLLOUT}.val_kwargs.temperature=0.6 "
        f"{ROLLOUT}.val_kwargs.do_sample=False",
        {"data.validation": "a.parquet", "training.validation_temperature": "0"},
        [],
    ),
    (
        "trainer.total_epochs=15 trainer.total_training_steps=7 trainer.test_freq=5",
        {"training.steps": "7", "training.validate_every": "5"},
        [],
    ),
    # A variable without a value is no crash.
    (
        f"data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=${{unset}} trainer.nnodes=$N",
        {"training.problems_per_step": "8"},
        [f"{ACTOR}.ppo_mini_batch_size", "trainer.nnodes"],
    ),
]


@pytest.mark.parametrize(("arguments", "overrides", "missing"), CASES)
def test_settings_of_verl(arguments, overrides, missing, tmp_path, capsys):
    group = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=8"
    script = f"python3 -m verl.trainer.main_ppo {group} {arguments}"
    result = translated(script)
    assert (result.recipe, result.overrides) == ("grpo", overrides | {"rollout.samples": "8"})
    assert keys(result.missing) == sorted(missing)
    printed(script, tmp_path, capsys)


PF_PPO = "algorithm.use_pf_ppo=True algorithm.pf_ppo.weight_pow=3 algorithm.pf_ppo.reweight_method="


@pytest.mark.parametrize(
    ("arguments", "recipe", "overrides"),
    [
        (f"{PF_PPO}pow", "ppo", {"method.resample": "pow", "method.resample_power": "3"}),
        (f"{PF_PPO}max_min", "ppo", {"method.resample": "max_min"}),
        ("algorithm.use_pf_ppo=True", "ppo", {"method.resample": "pow"}),
        (f"{PF_PPO.replace('True', 'False')}pow", "ppo", {}),
        # verl reads it with GAE only.
        (
            f"{PF_PPO}pow algorithm.adv_estimator=grpo {ROLLOUT}.n=8",
            "grpo",
            {"rollout.samples": "8"},
        ),
        (f"{ACTOR}.internal_layer=5", "bupo", {"method.num_blocks": "6"}),
        (
            f"{ACTOR}.use_off_policy_loss=True {ACTOR}.off_policy_reshape=p_div_p_0.1 "
            f"{ROLLOUT}.max_prefix_ratio=1.0 algorithm.adv_estimator=grpo",
            "luffy",
            {
                "method.off_shape": "p_div_p",
                "method.off_options.gamma": "0.1",
                "method.prefix_max": "1.0",
            },
        ),
        # Their literal values would be another loss: the recipes' comments explain the scale.
        (
            f"{ACTOR}.use_off_policy_loss=True {ACTOR}.entropy_coeff=0.001 {ACTOR}.grad_clip=1.0",
            "luffy",
            {},
        ),
        # The clip stays until the replay starts.
        (f"trainer.exp_metric=ent {ACTOR}.loss_remove_clip=True", "exgrpo", {}),
        (
            "reward_model.classmate_batch_size=null algorithm.adv_estimator=gdpo",
            "classmate_gdpo",
            {},
        ),
        (
            "algorithm.adv_estimator=grpo_main_classmate_separated "
            "data.train_files=data/confidence/a.parquet reward_model.think_start_str='<think>' "
            f"{COT}.classmate_reward_type=vanilla_reward "
            f"{COT}.token_level_classmate_reward_mode=all "
            "reward_model.llm_judge_model_name=org/rm "
            "reward_model.llm_judge_backend_type=hf_scoring",
            "classmate_think",
            {
                "data.train": "data/confidence/a.parquet",
                "method.advantage": "classmate_separated",
                "method.cot_start": "<think>",
                "method.reward_type": "vanilla",
                "method.classmate_tokens": "all",
                "reward.verifier": "model:org/rm",
            },
        ),
        (
            "algorithm.adv_estimator=grpo reward_model.think_start_str='<t>' "
            "reward_model.token_level_main_reward_mode=cot_only",
            "classmate_baseline",
            {"method.cot_start": "<t>", "method.main_tokens": "cot_only"},
        ),
    ],
)
def test_forks_and_critics_have_their_recipes(arguments, recipe, overrides, tmp_path, capsys):
    script = f"python3 -m verl.trainer.main_ppo {arguments}"
    result = translated(script)
    assert (result.recipe, result.overrides) == (recipe, overrides)
    assert keys(result.missing) in ([], ["the reward of this data set"])
    printed(script, tmp_path, capsys)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({f"{ACTOR}.use_off_policy_loss": "True", f"{ACTOR}.grad_clip": "2.0"}, "grad_clip"),
        ({f"{ACTOR}.use_off_policy_loss": "True", f"{ACTOR}.off_policy_reshape": "x"}, "reshape"),
        ({f"{ACTOR}.use_sft_prefix_reward": "True", f"{ACTOR}.internal_layer": "5"}, "prefix"),
        ({"trainer.exp_metric": "other", f"{ROLLOUT}.n": "8"}, "exp_metric"),
        ({"trainer.exp_metric": "ent", f"{ROLLOUT}.n_prefix": "1"}, "n_prefix"),
        ({"algorithm.adv_estimator": "new"}, "adv_estimator"),
    ],
)
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


SFT = """
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
    assert "optimizer.warmup_ratio=0.1" in printed(SFT, tmp_path, capsys)


@pytest.mark.parametrize(
    ("settings", "overrides", "missing"),
    [
        (
            {"engine.tensor_model_parallel_size": "2", "engine.x": "1"},
            {"cluster": "ray", "cluster.tensor_parallel": "2"},
            ["engine.x"],
        ),
        (
            {"data.train_files": "a", "data.multiturn.enable": "true", "data.messages_key": "m"},
            {"data.train": "a:m=messages"},
            [],
        ),
        (
            {"data.max_length": "64", "data.truncation": "left"},
            {"data.max_prompt_tokens": "64", "rollout.max_response_tokens": "64"},
            ["data.max_length", "data.truncation"],
        ),
        (
            {"trainer.n_gpus_per_node": "4", "trainer.nnodes": "2", "trainer.save_freq": "5"},
            {"cluster": "ray", "cluster.workers": "8", "training.checkpoint_every": "5"},
            [],
        ),
    ],
)
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
