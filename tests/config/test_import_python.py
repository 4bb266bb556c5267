"""`postgrad import` of Python scripts: dicts, constants and later assignments are read."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError


def _keys(lines):
    return [line.split(":")[0] for line in lines]


@pytest.mark.parametrize(
    "script",
    [
        "base = dict(learning_rate=5e-6, num_generations=16)\nGRPOConfig(**base)",
        "base = {'learning_rate': 5e-6, 'num_generations': 16}\nGRPOConfig(**base)",
        "GRPOConfig(**{'learning_rate': 5e-6, **dict(num_generations=16)})",
        "a = {'learning_rate': 5e-6}\nGRPOConfig(**(a | {'num_generations': 16}))",
        "a = {'learning_rate': 1.0}\na['learning_rate'] = 5e-6\na.update(num_generations=16)\n"
        "GRPOConfig(**a)",
        "a = {'num_generations': 16}\nb = {**a, 'learning_rate': 5e-6}\nc = b.copy()\n"
        "def main():\n    return GRPOConfig(**c)",
        "cfg = GRPOConfig(learning_rate=1.0)\ncfg.learning_rate = 5e-6\n"
        "setattr(cfg, 'num_generations', 16)",
        "class A:\n  def __init__(self):\n    self.cfg = GRPOConfig(num_generations=8)\n"
        "  def run(self):\n    self.cfg.learning_rate = 5e-6\n    self.cfg.num_generations *= 2",
        "LR = 5e-6\nN: int = 2 * 8\nGRPOConfig(learning_rate=LR, num_generations=N)",
        "def make():\n    return GRPOConfig(num_generations=8)\n"
        "def main():\n    args = make()\n    args.learning_rate = 5e-6\n"
        "    args.num_generations = 16",
        "values = dict(lr=5e-6)\nif __name__ == '__main__':\n    n = 16\n"
        "    GRPOConfig(learning_rate=values['lr'], num_generations=n)",
    ],
)
def test_settings_are_found_where_the_script_has_them(script):
    result = translate(*read_settings(script))
    assert result.overrides == {"optimizer.lr": "5e-06", "rollout.samples": "16"}
    assert result.missing == []


def test_names_of_texts_are_followed():
    script = (
        "MODEL = 'org/m'\nNAME = f'{MODEL}-grpo'\n"
        "trainer = GRPOTrainer(MODEL, args=GRPOConfig('out', run_name=NAME))"
    )
    overrides = translate(*read_settings(script)).overrides
    assert overrides == {"runs": "out", "name": "org/m-grpo", "model.path": "org/m"}


def test_settings_that_cannot_be_read_are_listed():
    script = (
        "base = load()\nmore = {'beta': 0.1, **base}\n"
        "def main(options, lr):\n"
        "    lr = lr * 2\n"
        "    GRPOConfig(learning_rate=lr, **more, **options)"
    )
    result = translate(*read_settings(script))
    assert result.overrides["method.kl_coef"] == "0.1"
    assert _keys(result.missing) == ["**base", "**options", "learning_rate=lr"]
    script = "def tune(args):\n    args.learning_rate = 1e-5\ntune(GRPOConfig(beta=0.1))"
    assert _keys(translate(*read_settings(script)).missing) == ["args.learning_rate=1e-05"]


def test_dicts_that_refer_to_themselves_are_read():
    script = (
        "from common import base\nbase = {**base, 'num_generations': 4}\nbase |= {'seed': 3}\n"
        "base.update(base, learning_rate=5e-6)\nbase['report_to'] = base\nGRPOConfig(**base)"
    )
    result = translate(*read_settings(script))
    expected = {"rollout.samples": "4", "seed": "3", "optimizer.lr": "5e-06"}
    assert result.overrides == expected
    assert [line.split(":")[0].split("=")[0] for line in result.missing] == ["**base", "report_to"]


def test_values_that_are_not_in_the_file_are_no_part_of_the_command():
    call = (
        "GRPOConfig(output_dir=f'out/{args.name}', dataset_name=args.data, num_generations=4, "
        "gradient_checkpointing_kwargs={'use_reentrant': f()}, report_to=os.environ['R'])"
    )
    result = translate(*read_settings(call))
    assert result.overrides == {"rollout.samples": "4"}
    assert [line.split("=")[0] for line in result.missing] == [
        "output_dir",
        "dataset_name",
        "report_to",
    ]


def test_config_file_of_trl(tmp_path):
    command = "accelerate launch trl grpo --config a.yaml --learning_rate 1e-5"
    result = translate(*read_settings(command))
    assert result.overrides == {"optimizer.lr": "1e-5"}
    assert _keys(result.missing) == ["--config=a.yaml"]
    (tmp_path / "a.yaml").write_text("learning_rate: 2.0e-6\nmodel_name_or_path: m\nhub_id: null\n")
    result = translate(*read_settings(command, folder=tmp_path))
    assert result.overrides == {"optimizer.lr": "1e-5", "model.path": "m"}
    assert result.missing == []


def test_values_under_a_condition_are_listed():
    script = (
        "device = 'cpu'\nlr = 1e-6\nbase = {}\n"
        "if big:\n    lr = 2e-6\n    device = 'cuda'\n    base['beta'] = 0.1\n"
        "values = dict(learning_rate=lr)\n"
        "cfg = GRPOConfig(**values, **base)\n"
        "if big:\n    cfg.max_steps = 5"
    )
    result = translate(*read_settings(script))
    assert result.overrides["optimizer.lr"] == "2e-06"
    assert result.overrides["training.steps"] == "5"
    assert _keys(result.missing) == ["max_steps=5", "lr", "base"]


def test_a_name_that_gets_another_value_is_no_config():
    script = (
        "config = GRPOConfig(learning_rate=1e-6)\n"
        "def load(config):\n    config.seed = 3\n"
        "config = object()\nconfig.top_k = 5"
    )
    result = translate(*read_settings(script))
    assert result.overrides == {"optimizer.lr": "1e-06"}
    assert _keys(result.missing) == ["config.top_k=5", "config.seed=3"]


def test_python_that_cannot_be_parsed_is_refused_with_its_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="line 2"):
        read_settings("from trl import GRPOConfig\nGRPOConfig(beta=)\n")
    script = tmp_path / "run.py"
    script.write_text("import trl\n\n!pip install trl\n")
    assert main(["import", str(script)]) == 2
    assert "line 3" in capsys.readouterr().err


def test_ppo_of_trl(tmp_path, capsys):
    """8 rows x 2 accumulated x 4 mini-batches: 64 responses per step, 1,000 of them in 16 steps."""
    call = (
        "PPOConfig(gamma=0.9, lam=0.8, kl_coef=0.1, kl_estimator='k3', num_ppo_epochs=2, "
        "response_length=99, cliprange=0.1, cliprange_value=0.3, sft_model_path='org/sft', "
        "reward_model_path='org/rm', num_mini_batches=4, total_episodes=1000, "
        "gradient_accumulation_steps=2, stop_token='eos', vf_coef=0.2, missing_eos_penalty=1.0)"
    )
    result = translate(*read_settings(call))
    assert result.recipe == "ppo"
    assert result.overrides == {
        "training.problems_per_step": "64",
        "method.gamma": "0.9",
        "method.lam": "0.8",
        "method.kl": "reward",
        "method.kl_estimator": "k3",
        "method.kl_coef": "0.1",
        "training.ppo_epochs": "2",
        "rollout.max_response_tokens": "99",
        "method.clip_low": "0.1",
        "method.clip_high": "0.1",
        "method.critic_clip": "0.3",
        "model.path": "org/sft",
        "reward.verifier": "model:org/rm",
        "training.updates_per_step": "4",
        "training.steps": "16",
    }
    assert _keys(result.missing) == [
        "reward_model_path=org/rm",
        "vf_coef=0.2",
        "missing_eos_penalty=1.0",
    ]
    assert translate(*read_settings("PPOConfig(kl_coef=0.0)")).overrides == {"method.kl": "none"}
    script = tmp_path / "run.py"
    script.write_text("PPOConfig(learning_rate=2e-6)")
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert "method.critic_lr=2e-06" in out and "method.lam=0.95" in out, out
    assert "training.ppo_epochs=4" in out and "needs a change" not in out, out


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("adamw_8bit", {"optimizer.kind": "adamw_8bit"}),
        ("adamw_bnb_8bit", {"optimizer.kind": "adamw_8bit"}),
        ("paged_adamw_8bit", {"optimizer.kind": "adamw_8bit"}),
        ("adamw_torch", {}),
    ],
)
def test_optimizers_of_transformers(value, expected):
    result = translate("GRPOConfig", {"optim": value})
    assert (result.overrides, result.missing) == (expected, [])
    assert translate("GRPOConfig", {"optim": "lion_8bit"}).missing == ["optim=lion_8bit"]


def test_sft_term_of_dpo():
    result = translate("DPOConfig", {"rpo_alpha": "0.5"})
    assert result.overrides == {"method.sft_coef": "0.5"}
    assert _keys(result.missing) == ["rpo_alpha=0.5"]  # its mean is another


@pytest.mark.parametrize(
    "script",
    [
        "lora = LoraConfig({})\nDPOTrainer(args=DPOConfig(), peft_config=lora)",
        "DPOTrainer(args=DPOConfig(), peft_config=peft.LoraConfig({}))",
        "model = get_peft_model(model, LoraConfig({}))\nDPOConfig()",
        "def main():\n    lora = LoraConfig({})\n    DPOTrainer(peft_config=lora)\n"
        "def other():\n    DPOConfig()",
    ],
)
def test_lora_of_peft(script):
    given = (
        "r=16, lora_alpha=64, target_modules=['q_proj', 'v_proj'], lora_dropout=0.05, bias='none'"
    )
    result = translate(*read_settings(script.format(given)))
    assert result.missing == []
    assert result.overrides == {
        "model.lora.rank": "16",
        "model.lora.alpha": "64",
        "model.lora.targets": "q_proj,v_proj",
        "model.lora.dropout": "0.05",
    }
    result = translate(*read_settings(script.format("use_rslora=True, task_type='CAUSAL_LM'")))
    assert result.overrides == {"model.lora.rank": "8", "model.lora.alpha": "8"}  # PEFT's
    assert _keys(result.missing) == ["target_modules of LoRA", "use_rslora=True of LoraConfig"]


def test_lora_of_the_command_line_of_trl():
    command = "trl sft --use_peft --lora_target_modules q_proj v_proj --assistant_only_loss"
    result = translate(*read_settings(command))
    assert (result.recipe, result.missing) == ("sft", [])
    assert result.overrides == {
        "model.lora.rank": "16",
        "model.lora.dropout": "0.05",
        "model.lora.targets": "q_proj,v_proj",
    }
    grpo = translate("GRPOConfig", {"use_peft": "True", "lora_target_modules": "all-linear"})
    assert _keys(grpo.missing) == ["lora_dropout=0.05"]  # refused for sampled responses
    off = translate("GRPOConfig", {"use_peft": "False", "lora_r": "8"})
    assert (off.overrides, off.missing) == ({}, [])


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("", ["assistant_only_loss (False in TRL)"]),
        ("assistant_only_loss=False", ["assistant_only_loss=False"]),
        ("completion_only_loss=False", ["completion_only_loss=False"]),
        ("assistant_only_loss=True", []),
        ("completion_only_loss=True", []),
        ("dataset_text_field='text'", []),
    ],
)
def test_tokens_that_trl_trains_on_and_sft_does_not_are_listed(arguments, missing):
    result = translate(*read_settings(f"SFTConfig({arguments})"))
    assert _keys(result.missing) == missing


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        ('rows = load_dataset("a/b-c", split="train")', "hub:a/b-c:train"),
        ('rows = datasets.load_dataset("a/b", split="test")', "hub:a/b:test"),
        ('rows = load_dataset("a/b", split="train")\nrows = rows.map(f)', None),
        ('rows = load_dataset("a/b", split="train[:10%]")', None),
        ('rows = load_dataset("a/b", "main", split="train")', None),
        ('rows = load_dataset("json", data_files="a.jsonl", split="train")', None),
        ('rows = load_dataset("./b", split="train")', None),
        ('rows = load_dataset(name, split="train")', None),
        ('rows = load_dataset("a/b")', None),
    ],
)
def test_a_split_of_the_hub_is_the_training_data(lines, source):
    script = f"{lines}\nGRPOTrainer(train_dataset=rows, args=GRPOConfig(seed=3))"
    result = translate(*read_settings(script))
    assert result.overrides.get("data.train") == source
    assert [line.split("=")[0] for line in result.missing] == ([] if source else ["train_dataset"])
