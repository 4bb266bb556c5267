"""`postgrad import` of TRL's configs: the command, and what differs there."""

import pytest
from imported import keys, printed, translated

from postgrad.translate import defaults_of, translate

# (call, overrides, arguments without an equivalent)
GRPO = [
    ("", {}, []),
    (
        "output_dir='out', learning_rate=1e-5, num_generations=8, num_iterations=2, beta=0.04, "
        "adam_beta2=0.95, adam_epsilon=1e-6, strange='yes'",
        {
            "runs": "out",
            "optimizer.lr": "1e-05",
            "rollout.samples": "8",
            "training.ppo_epochs": "2",
            "method.kl": "loss",
            "method.kl_coef": "0.04",
            "method.kl_ratio": "true",
            "optimizer.betas": "[0.9,0.95]",
            "optimizer.eps": "1e-06",
        },
        ["strange"],
    ),
    # Losses: TRL's epsilon is 0.2 for all of them.
    (
        "importance_sampling_level='sequence'",
        {"method.loss": "gspo", "method.clip_low": "0.2", "method.clip_high": "0.2"},
        [],
    ),
    (
        "importance_sampling_level='sequence', loss_type='grpo', epsilon=3e-4, epsilon_high=4e-4",
        {
            "method.loss": "gspo",
            "method.aggregation": "seq-mean-token-mean",
            "method.clip_low": "0.0003",
            "method.clip_high": "0.0004",
        },
        [],
    ),
    ("importance_sampling_level='sequence', delta=4.0", None, ["delta"]),
    (
        "epsilon_high=0.28, epsilon=0.1",
        {"method.clip_low": "0.1", "method.clip_high": "0.28"},
        [],
    ),
    ("epsilon_high=0.3", {"method.clip_high": "0.3"}, []),
    ("delta=4.0", {"method.dual_clip": "4.0"}, []),
    # TRL's bound is the weight itself.
    (
        "loss_type='cispo', epsilon_high=5.0, epsilon=0.1",
        {"method.loss": "cispo", "method.aggregation": "token-mean", "method.clip_high": "4"},
        [],
    ),
    (
        "loss_type='cispo', epsilon=0.2",
        {"method.loss": "cispo", "method.aggregation": "token-mean"},
        ["loss_type"],
    ),
    (
        "loss_type='cispo', importance_sampling_level='sequence', epsilon_high=5.0",
        None,
        ["importance_sampling_level"],
    ),
    (
        "loss_type='sapo', sapo_temperature_neg=1.2, epsilon=0.1",
        {
            "method.loss": "sapo",
            "method.aggregation": "seq-mean-token-mean",
            "method.loss_options.temperature_negative": "1.2",
        },
        [],
    ),
    (
        "loss_type='luspo', importance_sampling_level='sequence', epsilon=2e-3",
        {
            "method.loss": "gspo",
            "method.aggregation": "seq-mean-token-sum",
            "method.clip_low": "0.002",
            "method.clip_high": "0.002",
        },
        [],
    ),
    ("loss_type='bnpo'", {"method.aggregation": "token-mean"}, []),
    ("loss_type='new'", {}, ["loss_type"]),
    ("scale_rewards='batch'", {"method.advantage": "lite_ppo"}, []),
    ("scale_rewards='none'", {"method.normalize_by_std": "false"}, []),
    ("scale_rewards='group'", {"method.normalize_by_std": "true"}, []),
    ("off_policy_mask_threshold=0.5", {}, ["off_policy_mask_threshold"]),
    ("top_entropy_quantile=0.2", {"method.top_entropy": "0.2"}, []),
    ("entropy_coef=0.01", {"method.entropy_coef": "0.01"}, []),
    ("entropy_coef=0.01, use_adaptive_entropy=True", {}, ["entropy_coef", "use_adaptive_entropy"]),
    (
        "loss_type='grpo', entropy_coef=0.01",
        {"method.entropy_coef": "0.01", "method.aggregation": "seq-mean-token-mean"},
        ["entropy_coef"],
    ),
    (
        "beta=0.1, use_bias_correction_kl=False",
        {"method.kl": "loss", "method.kl_coef": "0.1"},
        [],
    ),
    ("beta=0.0, use_bias_correction_kl=True", {}, []),
    ("beta=0.1, importance_sampling_level='sequence'", None, ["beta"]),
    # Values that mean the same as no argument.
    ("repetition_penalty=1.0, top_entropy_quantile=1.0, disable_dropout=True", {}, []),
    ("repetition_penalty=1.1", {}, ["repetition_penalty"]),
    ("vllm_importance_sampling_mode='token_truncate'", {}, ["vllm_importance_sampling_mode"]),
    # Data
    ("shuffle_dataset=False", {"data.shuffle": "false"}, []),
    (
        "chat_template_kwargs={'enable_thinking': False}",
        {"data.template_options.enable_thinking": "false"},
        [],
    ),
    ("model_init_kwargs={'revision': 'v2'}", {}, ["model_init_kwargs"]),
    ("chat_template_path='x'", {}, ["chat_template_path"]),
    # A reference that follows the policy is counted in updates there, of which a step has two.
    (
        "beta=0.01, sync_ref_model=True, ref_model_sync_steps=64, ref_model_mixup_alpha=1.0, "
        "per_device_train_batch_size=8, num_iterations=2",
        {
            "training.problems_per_step": "1",
            "training.ppo_epochs": "2",
            "method.kl": "loss",
            "method.kl_coef": "0.01",
            "method.kl_ratio": "true",
            "method.reference_sync_every": "32",
            "method.reference_mixup": "1.0",
        },
        [],
    ),
    # Sizes
    (
        "loss_type='dr_grpo', scale_rewards=False, num_generations=4, "
        "per_device_train_batch_size=8, gradient_accumulation_steps=2",
        {
            "method.aggregation": "seq-mean-token-sum-norm",
            "method.normalize_by_std": "false",
            "rollout.samples": "4",
            "training.problems_per_step": "4",
        },
        [],
    ),
    (
        "per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4, "
        "num_generations=4, max_steps=-1, delta=None",
        {
            "training.problems_per_step": "8",
            "training.updates_per_step": "2",
            "rollout.samples": "4",
        },
        [],
    ),
    # Trackers
    ("report_to=['wandb']", {"track": "wandb"}, []),
    ("report_to='tensorboard'", {"track": "tensorboard"}, []),
    ("report_to=['none']", {}, []),
    ("report_to=['wandb', 'tensorboard']", {"track": "[wandb,tensorboard]"}, []),
    ("report_to=['tensorboard', 'mlflow']", {"track": "tensorboard"}, ["report_to"]),
    # Schedules
    (
        "lr_scheduler_type='constant', warmup_ratio=0.1",
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": "0"},
        ["warmup_ratio"],
    ),
    (
        "lr_scheduler_type='constant_with_warmup', warmup_steps=5",
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": "5"},
        [],
    ),
    (
        "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}",
        {"optimizer.schedule": "cosine"},
        ["lr_scheduler_kwargs"],
    ),
    ("lr_scheduler_type='warmup_stable_decay'", {}, ["lr_scheduler_type"]),
    ("weight_decay=0.1", {"optimizer.weight_decay": "0.1"}, ["weight_decay"]),
    ("weight_decay=0.0", {"optimizer.weight_decay": "0.0"}, []),
    ("optim='adamw_8bit'", {"optimizer.kind": "adamw_8bit"}, []),
    ("optim='paged_adamw_8bit'", {"optimizer.kind": "adamw_8bit"}, []),
    ("optim='adamw_torch'", {}, []),
    ("optim='lion_8bit'", {}, ["optim"]),
    # Adapters have no dropout.
    (
        "use_peft=True, lora_target_modules='all-linear'",
        {"model.lora.rank": "16", "model.lora.targets": "all-linear"},
        ["lora_dropout"],
    ),
    ("use_peft=False, lora_r=8", {}, []),
    (
        "load_in_4bit=True, lora_r=8, lora_target_modules='all-linear'",
        {
            "model.quantization": "4bit",
            "model.lora.rank": "8",
            "model.lora.targets": "all-linear",
        },
        [],
    ),
]
OTHERS = [
    ("SFTConfig(loss_type='nll', assistant_only_loss=True)", {}, []),
    ("SFTConfig(loss_type='dft', completion_only_loss=True)", {"method.loss": "dft"}, []),
    ("SFTConfig(dataset_text_field='text')", {}, []),
    ("SFTConfig()", {}, ["assistant_only_loss"]),
    ("SFTConfig(assistant_only_loss=False)", {}, ["assistant_only_loss"]),
    ("SFTConfig(completion_only_loss=False)", {}, ["completion_only_loss"]),
    ("RewardConfig(warmup_steps=0.1)", {"optimizer.warmup_ratio": "0.1"}, []),
    ("RewardConfig(warmup_steps=10)", {"optimizer.warmup_steps": "10"}, []),
    ("RewardConfig(learning_rate=0.1)", {"optimizer.lr": "0.1"}, []),
    ("DPOConfig(save_steps=0.25)", {}, ["save_steps"]),
    ("DPOConfig(save_strategy='no', save_steps=5)", {}, []),
    (
        "DPOConfig(save_strategy='epoch', eval_strategy='epoch')",
        {},
        ["eval_strategy", "save_strategy"],
    ),
    ("DPOConfig(packing=True)", {}, ["packing"]),
    ("DPOConfig(packing=False)", {}, []),
    ("DPOConfig(train_sampling_strategy='sequential')", {}, ["train_sampling_strategy"]),
    ("KTOConfig(beta=0.2, bf16=True, loss_type='kto')", {"method.beta": "0.2"}, []),
    ("KTOConfig(loss_type='apo_zero_unpaired')", {}, ["loss_type"]),
    ("DPOConfig(loss_type='ipo', label_smoothing=0.1)", {"method.loss": "ipo"}, []),
    (
        "DPOConfig(loss_type='sigmoid_norm')",
        {"method.loss": "sigmoid", "method.length_normalized": "true"},
        [],
    ),
    (
        "DPOConfig(label_smoothing=0.1)",
        {},
        ["label_smoothing"],
    ),
    ("DPOConfig(loss_type=['sigmoid', 'sft'], loss_weights=[1, 2])", {}, None),
    ("DPOConfig(loss_type='robust')", {}, ["loss_type"]),
    ("DPOConfig(rpo_alpha=0.5)", {"method.sft_coef": "0.5"}, ["rpo_alpha"]),  # another mean
    (
        "DPOConfig(rpo_alpha=0.5, per_device_train_batch_size=1)",
        {"method.sft_coef": "0.5", "training.problems_per_step": "1"},
        [],
    ),
    (
        "DPOConfig(sync_ref_model=True)",
        {"method.reference_sync_every": "512", "method.reference_mixup": "0.6"},
        [],
    ),
    (
        "DPOConfig(max_length=2048, save_total_limit=2)",
        {
            "rollout.max_response_tokens": "2048",
            "data.max_prompt_tokens": "2048",
            "training.keep_checkpoints": "2",
        },
        ["max_length"],
    ),
    (
        "DPOConfig(max_length=2048, max_prompt_length=512)",
        {"rollout.max_response_tokens": "2048", "data.max_prompt_tokens": "512"},
        ["max_length"],
    ),
    (
        "RLOOConfig(beta=0.05)",
        {"method.kl": "reward", "method.kl_estimator": "k1", "method.kl_coef": "0.05"},
        [],
    ),
    ("RLOOConfig(beta=0.0)", {"method.kl": "none"}, []),
    # TRL clips the ratio of a response, which is 1 at the first update after a generation.
    ("RLOOConfig(epsilon=0.1, loss_type=None)", {}, []),
    ("RLOOConfig(num_iterations=2)", {"training.ppo_epochs": "2"}, ["epsilon"]),
]
CALLS = [(f"GRPOConfig({arguments})", *rest) for arguments, *rest in GRPO] + OTHERS


@pytest.mark.parametrize(("call", "overrides", "missing"), CALLS)
def test_arguments_of_configs(call, overrides, missing, tmp_path, capsys):
    """None: what the case is not about."""
    result = translated(f"import trl\ntrl.{call}")
    assert overrides is None or result.overrides == overrides
    assert missing is None or keys(result.missing) == missing
    assert missing is not None or result.missing
    printed(f"import trl\ntrl.{call}", tmp_path, capsys, "run.py")


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
    result = translated(f"GRPOConfig(per_device_train_batch_size=8, {samples}{arguments})")
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
    result = translated(call)
    assert result.missing == []
    assert result.overrides["training.steps"] == "10"
    assert result.overrides["training.checkpoint_every"] == "4"
    assert result.overrides["optimizer.warmup_steps"] == "1"
    one = translated("GRPOConfig(num_iterations=0, max_steps=60)")
    assert one.overrides["training.steps"] == "60"
    more = translated(call.replace("max_steps=60", "max_steps=61"))
    assert more.overrides["training.steps"] == "11"
    assert keys(more.missing) == ["max_steps"]


def test_defaults_of_trl_follow_what_the_script_sets():
    """Worked out by hand: 8 responses per step are 2 problems with 4 samples."""
    grpo = {"rollout.samples": "4", "method.loss": "gspo", "training.steps": "9"}
    values = defaults_of("GRPOConfig", "grpo", grpo)
    assert values["training.problems_per_step"] == "2"
    assert not {"method.dual_clip", "training.epochs", "rollout.samples"} & values.keys()
    rloo = defaults_of("RLOOConfig", "rloo", {"method.kl": "none"})
    assert not [key for key in rloo if key.startswith("method.kl")]
    with_kl = defaults_of("GRPOConfig", "grpo", {"method.kl": "loss"})
    assert with_kl["method.kl_ratio"] == "true"  # use_bias_correction_kl
    lora = translate("SFTConfig", {"use_peft": "True", "assistant_only_loss": "True"})
    assert defaults_of("SFTConfig", "sft", lora.overrides)["model.lora.alpha"] == "32"
