"""`postgrad import` of Python scripts: literal arguments are read, the others are to be set."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError


def _keys(lines):
    return [line.removeprefix("set it: ").partition(" (")[0] for line in lines]


@pytest.mark.parametrize(
    ("script", "overrides", "to_set"),
    [
        (
            "import trl\ndef main():\n  trl.GRPOConfig('out', learning_rate=5e-6, seed=-1)",
            {"runs": "out", "optimizer.lr": "5e-06", "seed": "-1"},
            [],
        ),
        (
            "LR = 5e-6\nGRPOConfig(learning_rate=LR, num_generations=2 * 8, seed=3)",
            {"seed": "3"},
            ["learning_rate", "num_generations"],
        ),
        (
            "base = dict(learning_rate=1.0)\nGRPOConfig(f'{a}', run_name=f'{b}', **base, **load())",
            {},
            ["run_name", "**base", "**load()", "output_dir"],
        ),
        (
            "args = GRPOConfig(seed=1)\nargs.learning_rate = 1e-5\nargs.max_steps *= 2",
            {"seed": "1"},
            ["learning_rate", "max_steps"],
        ),
        # Sizes and counts in updates depend on each other.
        (
            "GRPOConfig(per_device_train_batch_size=b, gradient_accumulation_steps=2, max_steps=9)",
            {},
            ["per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"],
        ),
        # What changes nothing here needs no line.
        ("GRPOConfig(bf16=use_bf16(), vllm_mode=mode, seed=1)", {"seed": "1"}, []),
        (
            "GRPOTrainer('org/m', [f, g], train_dataset=load_dataset('a/b', split='train'), "
            "args=GRPOConfig(seed=1), tools=[multiply], processing_class=tokenizer)",
            {"seed": "1", "model.path": "org/m"},
            ["reward_funcs", "train_dataset", "tools"],
        ),
        (
            "SFTTrainer(model=A.from_pretrained('m'), peft_config=lora, eval_dataset=None, "
            "args=SFTConfig(assistant_only_loss=True))",
            {},
            ["model", "peft_config"],
        ),
    ],
)
def test_literals_are_read_and_the_others_are_to_be_set(script, overrides, to_set):
    result = translate(*read_settings(script))
    assert (result.overrides, _keys(result.missing)) == (overrides, to_set)


@pytest.mark.parametrize(
    "script",
    [
        "lora = LoraConfig({})\nDPOTrainer(args=DPOConfig(), peft_config=lora)",
        "DPOTrainer(args=DPOConfig(), peft_config=peft.LoraConfig({}))",
        "model = get_peft_model(model, LoraConfig({}))\nDPOConfig()",
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
    result = translate(*read_settings(script.format("r=R, use_rslora=True, task_type=TaskType.A")))
    assert result.overrides == {"model.lora.rank": "8", "model.lora.alpha": "8"}  # PEFT's
    lines = [line.partition(":")[0] for line in result.missing if "set it" not in line]
    assert lines == ["target_modules of LoRA", "use_rslora=True of LoraConfig"]
    assert "set it: r of LoraConfig (model.lora.rank)" in result.missing


def test_what_is_to_be_set_is_printed_beside_the_command(tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text("GRPOConfig(learning_rate=args.lr, push_to_hub=True)")
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert "\n# set it: learning_rate (optimizer.lr)\n" in out
    assert "\n# no equivalent: push_to_hub=True: postgrad push" in out


def test_config_file_of_trl(tmp_path):
    command = "accelerate launch trl grpo --config a.yaml --learning_rate 1e-5"
    result = translate(*read_settings(command))
    assert result.overrides == {"optimizer.lr": "1e-5"}
    assert [line.partition(":")[0] for line in result.missing] == ["--config=a.yaml"]
    (tmp_path / "a.yaml").write_text("learning_rate: 2.0e-6\nmodel_name_or_path: m\nhub_id: null\n")
    result = translate(*read_settings(command, folder=tmp_path))
    assert result.overrides == {"optimizer.lr": "1e-5", "model.path": "m"}
    assert result.missing == []


def test_python_that_cannot_be_parsed_is_refused_with_its_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="line 2"):
        read_settings("from trl import GRPOConfig\nGRPOConfig(beta=)\n")
    script = tmp_path / "run.py"
    script.write_text("import trl\n\n!pip install trl\n")
    assert main(["import", str(script)]) == 2
    assert "line 3" in capsys.readouterr().err


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
    assert [line.partition(":")[0] for line in result.missing] == ["rpo_alpha=0.5"]  # another mean


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
    assert [line.partition(":")[0] for line in grpo.missing] == ["lora_dropout=0.05"]  # refused
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
    assert [line.partition(":")[0] for line in result.missing] == missing
