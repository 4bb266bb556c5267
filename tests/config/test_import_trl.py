"""`postgrad import` of TRL's losses, schedules and data: what is exact, and what has a line."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from postgrad.algorithms.preference import dpo
from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError


def _keys(lines):
    return [line.split(":")[0].split("=")[0] for line in lines]


def translated(call):
    return translate(*read_settings(call))


def trl_dpo(pairs, reference, lengths, kinds, weights, beta):
    """TRL's loss of one pair, from its documentation: sums of log-probs, then weighted terms."""
    difference = pairs - reference
    h = difference[0] - difference[1]
    mean = difference / lengths
    terms = {
        "sigmoid": -logsigmoid(beta * h),
        "hinge": torch.relu(1 - beta * h),
        "ipo": (mean[0] - mean[1] - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -logsigmoid(beta * (mean[0] - mean[1])),
        "sft": -pairs[0] / lengths[0],
    }
    return sum(weight * terms[kind] for kind, weight in zip(kinds, weights, strict=True))


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("weights", [[1.0, 0.5], [0.8, 1.0]])
def test_a_loss_with_an_sft_term_is_that_of_trl_up_to_its_scale(kind, weights):
    call = (
        f"DPOConfig(loss_type=['{kind}', 'sft'], loss_weights={weights}, beta=0.2, "
        "per_device_train_batch_size=1)"
    )
    overrides = translated(call).overrides
    generator = torch.Generator().manual_seed(0)
    pairs, reference = -10 * torch.rand(2, 2, generator=generator)
    lengths = torch.tensor([3.0, 7.0])
    is_mean = kind == "ipo" or overrides.get("method.length_normalized") == "true"
    scale = 1 / lengths if is_mean else torch.ones(2)
    loss = dpo(
        *(pairs * scale)[:, None],
        *(reference * scale)[:, None],
        beta=float(overrides["method.beta"]),
        loss=overrides["method.loss"],
    ).values
    loss = loss - float(overrides["method.sft_coef"]) * pairs[0] / lengths[0]
    expected = trl_dpo(pairs, reference, lengths, [kind, "sft"], weights, 0.2)
    torch.testing.assert_close(loss[0] * weights[0], expected)


def test_weights_of_a_list_scale_the_clipping():
    exact = translated(
        "DPOConfig(loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.2], "
        "per_device_train_batch_size=1)"
    )
    assert exact.missing == []
    assert exact.overrides == {
        "training.problems_per_step": "1",
        "method.loss": "sigmoid",
        "method.sft_coef": "0.2",
    }
    scaled = translated(
        "DPOConfig(loss_type=['sft', 'ipo'], loss_weights=[1.0, 0.5], max_grad_norm=2.0)"
    )
    assert scaled.overrides == {
        "method.loss": "ipo",
        "method.sft_coef": "2",
        "optimizer.max_grad_norm": "4",
        "optimizer.eps": "2e-08",
    }
    assert _keys(scaled.missing) == ["loss_type", "loss_weights"]
    assert "micro-batch" in scaled.missing[0]


@pytest.mark.parametrize(
    ("arguments", "overrides", "missing"),
    [
        (
            "loss_type=['sigmoid', 'bco_pair', 'sft'], loss_weights=[1.0, 0.2, 0.5], "
            "per_device_train_batch_size=1",
            {"training.problems_per_step": "1", "method.loss": "sigmoid", "method.sft_coef": "0.5"},
            ["bco_pair left out"],
        ),
        ("loss_type=['sigmoid', 'hinge']", {"method.loss": "sigmoid"}, ["hinge left out"]),
        ("loss_type=['robust', 'sft']", {}, ["is needed"]),
        ("loss_type='robust', label_smoothing=0.1", {}, ["is needed"]),
        ("loss_type=['sft']", {}, ["is needed"]),
        ("loss_type=['hinge', 'sft'], loss_weights=[1.0, 0.0]", {"method.loss": "hinge"}, []),
        ("loss_type=['hinge'], label_smoothing=0.1", {"method.loss": "hinge"}, []),
        ("label_smoothing=0.1", {"method.label_smoothing": "0.1"}, ["TRL 1 ignores it"]),
        ("loss_type=['hinge'], loss_weights=[1, 2]", {"method.loss": "hinge"}, ["one number per"]),
    ],
)
def test_losses_of_dpo_that_are_not_equal_have_one_line(arguments, overrides, missing):
    result = translated(f"DPOConfig({arguments})")
    assert result.overrides == overrides
    assert len(result.missing) == len(missing)
    for line, part in zip(result.missing, missing, strict=True):
        assert part in line


@pytest.mark.parametrize("text", ["--loss_type sigmoid sft", "--loss_type=['sigmoid','sft']"])
def test_a_list_of_losses_on_the_command_line(text):
    result = translated(f"trl dpo {text} --per_device_train_batch_size 1")
    assert result.overrides["method.sft_coef"] == "1"
    file = "seed: 1\nloss_type: [sigmoid, sft]\nloss_weights: [1.0, 2.0]\n"
    assert translated(file).overrides["method.sft_coef"] == "2"


@pytest.mark.parametrize(
    ("arguments", "overrides", "missing"),
    [
        (
            "loss_type='cispo', epsilon_high=5.0",
            {
                "method.loss": "cispo",
                "method.aggregation": "token-mean",
                "method.clip_high": "4",
            },
            [],
        ),
        (
            "loss_type='cispo', epsilon=0.2",
            {"method.loss": "cispo", "method.aggregation": "token-mean"},
            ["loss_type"],
        ),
        (
            "loss_type='sapo', sapo_temperature_neg=1.1, epsilon=0.2",
            {
                "method.loss": "sapo",
                "method.aggregation": "seq-mean-token-mean",
                "method.loss_options.temperature_negative": "1.1",
            },
            [],
        ),
        (
            "importance_sampling_level='sequence'",  # TRL's clip is 0.2 for each level
            {"method.loss": "gspo", "method.clip_low": "0.2", "method.clip_high": "0.2"},
            [],
        ),
        ("loss_type='new'", {}, ["loss_type"]),
        ("loss_type='luspo'", {"method.aggregation": "seq-mean-token-sum"}, []),
        ("loss_type='bnpo'", {"method.aggregation": "token-mean"}, []),
        (
            "beta=0.1",
            {"method.kl": "loss", "method.kl_coef": "0.1", "method.kl_ratio": "true"},
            [],
        ),
        (
            "beta=0.1, use_bias_correction_kl=False",
            {"method.kl": "loss", "method.kl_coef": "0.1"},
            [],
        ),
        ("scale_rewards='batch'", {"method.advantage": "lite_ppo"}, []),
        ("scale_rewards='none'", {"method.normalize_by_std": "false"}, []),
        ("scale_rewards='group'", {"method.normalize_by_std": "true"}, []),
        (
            "epsilon=0.1, epsilon_high=0.3",
            {"method.clip_low": "0.1", "method.clip_high": "0.3"},
            [],
        ),
        ("epsilon_high=0.3", {"method.clip_high": "0.3"}, []),
        ("entropy_coef=0.01", {"method.entropy_coef": "0.01"}, []),
        (
            "entropy_coef=0.01, use_adaptive_entropy=True",
            {},
            ["entropy_coef", "use_adaptive_entropy"],
        ),
        ("off_policy_mask_threshold=0.5", {"method.sequence_mask": "0.5"}, []),
        ("repetition_penalty=1.0, top_entropy_quantile=1.0, disable_dropout=True", {}, []),
        ("repetition_penalty=1.1", {}, ["repetition_penalty"]),
        ("shuffle_dataset=False", {"data.shuffle": "false"}, []),
        (
            "chat_template_kwargs={'enable_thinking': False}",
            {"data.template_options.enable_thinking": "false"},
            [],
        ),
        (
            "model_init_kwargs={'dtype': 'bfloat16', 'trust_remote_code': True}",
            {"model.trust_remote_code": "true"},
            [],
        ),
        ("model_init_kwargs={'revision': 'v2'}", {}, ["model_revision"]),
    ],
)
def test_arguments_of_grpo(arguments, overrides, missing):
    result = translated(f"GRPOConfig({arguments})")
    assert result.overrides == overrides
    assert _keys(result.missing) == missing


def test_a_clip_of_rloo_counts_after_the_first_update_only():
    assert translated("RLOOConfig(epsilon=0.2, loss_type=None)").missing == []
    [line] = translated("RLOOConfig(epsilon=0.3, num_iterations=2)").missing
    assert line.startswith("epsilon=0.3: ")
    assert _keys(translated("RLOOConfig(num_iterations=2)").missing) == ["epsilon"]


@pytest.mark.parametrize(
    ("arguments", "overrides", "missing"),
    [
        ("loss_type='nll'", {}, []),
        ("loss_type='dft'", {"method.loss": "dft"}, []),
        ("warmup_steps=0.1", {"optimizer.warmup_ratio": "0.1"}, []),
        ("warmup_steps=10", {"optimizer.warmup_steps": "10"}, []),
        (
            "warmup_ratio=0.1, lr_scheduler_type='constant'",
            {"optimizer.schedule": "constant", "optimizer.warmup_steps": "0"},
            ["warmup_ratio"],
        ),
        (
            "warmup_ratio=0.1, lr_scheduler_type='constant_with_warmup'",
            {"optimizer.warmup_ratio": "0.1", "optimizer.schedule": "constant"},
            [],
        ),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}",
            {"optimizer.final_lr_ratio": "0.1", "optimizer.schedule": "cosine"},
            [],
        ),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr': 1e-06}, "
            "learning_rate=1e-05",
            {
                "optimizer.final_lr_ratio": "0.1",
                "optimizer.schedule": "cosine",
                "optimizer.lr": "1e-05",
            },
            [],
        ),
        (
            "lr_scheduler_type='cosine', lr_scheduler_kwargs={'num_cycles': 2}",
            {"optimizer.schedule": "cosine"},
            ["lr_scheduler_kwargs"],
        ),
        (
            "save_steps=0.25, max_steps=10",
            {"training.checkpoint_every": "3", "training.steps": "10"},
            [],
        ),
        ("save_steps=0.25", {}, ["save_steps"]),
        ("save_strategy='no', save_steps=5", {}, []),
        ("save_strategy='epoch', eval_strategy='epoch'", {}, ["save_strategy", "eval_strategy"]),
        ("packing=True", {}, ["packing"]),
        ("packing=False", {}, []),
        ("optim='paged_adamw_32bit'", {}, []),
        ("train_sampling_strategy='sequential'", {"data.shuffle": "false"}, []),
    ],
)
def test_arguments_of_every_trainer(arguments, overrides, missing):
    result = translated(f"SFTConfig(assistant_only_loss=True, {arguments})")
    assert result.overrides == overrides
    assert _keys(result.missing) == missing


def test_splits_of_a_data_set_and_negated_flags():
    result = translated(
        "trl dpo --dataset_name a/b --dataset_train_split train_prefs "
        "--dataset_test_split test_prefs --eval_strategy steps --no_remove_unused_columns"
    )
    assert result.missing == []
    assert result.overrides == {
        "data.train": "hub:a/b:train_prefs",
        "data.validation": "hub:a/b:test_prefs",
    }
    plain = translated("trl dpo --dataset_name a/b --dataset_test_split test_prefs")
    assert (plain.overrides, plain.missing) == ({"data.train": "hub:a/b"}, [])


@pytest.mark.parametrize(
    "launch", ["accelerate launch --num_processes 4", "python", "torchrun --nproc_per_node=2"]
)
def test_scripts_of_trl_with_their_flags(launch):
    command = f"{launch} trl/scripts/dpo.py \\\n  --model_name_or_path org/m --beta 0.2"
    result = translated(command)
    assert (result.recipe, result.overrides) == (
        "dpo",
        {"model.path": "org/m", "method.beta": "0.2"},
    )
    verl = (
        "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer optim.lr=1e-5 "
        "model.partial_pretrain=m custom_cls.path=dpo.py"
    )
    assert translated(verl).recipe == "sft"


def test_a_script_whose_config_is_its_command_line_says_so():
    text = "parser = TrlParser((ScriptArguments, DPOConfig))\nargs = parser.parse_args()\n"
    with pytest.raises(ConfigError, match="command line"):
        read_settings(text, is_python=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "DPOConfig(loss_type=['sigmoid', 'bco_pair', 'sft'], loss_weights=[0.8, 0.2, 1.0])",
        "DPOConfig(loss_type=['sigmoid_norm'], label_smoothing=0.1)",
        "GRPOConfig(loss_type='cispo', epsilon_high=5.0, num_iterations=2)",
        "GRPOConfig(loss_type='sapo', sapo_temperature_pos=1.0, steps_per_generation=4, beta=0.1)",
        "GRPOConfig(importance_sampling_level='sequence', loss_type='luspo', delta=4.0)",
        "RLOOConfig(epsilon=0.2, epsilon_high=0.3)",
        "SFTConfig(loss_type='dft', warmup_steps=0.1)",
        "KTOConfig(loss_type='kto')",
    ],
)
def test_the_commands_pass_the_checks(call, tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text(call)
    assert main(["import", str(script)]) == 0
    assert "needs a change" not in capsys.readouterr().out
