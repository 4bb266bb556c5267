"""`postgrad import`: which training a script starts, its variables, files, flags and literals."""

import pytest
from imported import keys, printed, translated
from refused import refused
from tables import tabled

from postgrad.cli.main import main
from postgrad.errors import ConfigError
from postgrad.translate import read_settings

RL = "algorithm.adv_estimator=grpo data.train_batch_size=8"
MAIN_PPO = "python3 -m verl.trainer.main_ppo"


@tabled("script")
def test_what_is_no_single_training_is_refused(script, tmp_path, capsys):
    with pytest.raises(ConfigError):
        read_settings(script)
    file = tmp_path / "run.sh"
    file.write_text(script)
    assert main(["import", str(file)]) == 2
    assert main(["import", str(tmp_path / "missing.sh")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_programs_and_variables_that_change_the_meaning_are_listed():
    result = translated(
        "if [ $1 ]; then lr=1e-6\nelse\nlr=2e-6\nfi\n"
        "python3 data.py data.local_dir=x\n"
        f"python3 -m recipe.spin.main_spin {RL} actor_rollout_ref.actor.optim.lr=$lr"
    )
    assert result.overrides == {"training.problems_per_step": "8", "optimizer.lr": "2e-6"}
    assert keys(result.missing) == ["$lr", "recipe.spin.main_spin"]
    script = f"python3 -m verl.experimental.one_step_off_policy.main_ppo {RL}"
    assert "rollout.staleness=1" in translated(script).missing[0]


def test_variables_of_a_shell():
    overrides = translated(
        'root=${ROOT:-"${HOME}/data"}\nfile="${root}"/a.parquet\ngpus=4\nper=8\n'
        f"{MAIN_PPO} algorithm.adv_estimator=grpo data.train_files=$file "
        "data.train_batch_size=$(((gpus + 4) * per)) actor_rollout_ref.rollout.n=$(( per % 3 ))"
    ).overrides
    assert overrides["data.train"] == "${HOME}/data/a.parquet"
    assert overrides["training.problems_per_step"] == "64"
    assert overrides["rollout.samples"] == "2"


# ---- files of settings


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
    script = f"{MAIN_PPO} {options} algorithm.adv_estimator=grpo"
    assert len(translated(script).missing) == num_lines
    if num_lines:
        with refused("missing"):
            read_settings(f"{MAIN_PPO} {options}")


def test_a_config_file_of_trl(tmp_path):
    command = "accelerate launch trl grpo --config a.yaml --learning_rate 1e-5"
    result = translated(command)
    assert result.overrides == {"optimizer.lr": "1e-5"}
    assert keys(result.missing) == ["--config"]
    (tmp_path / "a.yaml").write_text("learning_rate: 2.0e-6\nmodel_name_or_path: m\nhub_id: null\n")
    result = translated(command, folder=tmp_path)
    assert result.overrides == {"optimizer.lr": "1e-5", "model.path": "m"}
    assert result.missing == []


def test_a_yaml_file_of_trl(tmp_path, capsys):
    text = (
        "# Model\nmodel_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\ntorch_dtype: bfloat16\n"
        "dataset_name: open-r1/OpenR1-Math\nnum_generations: 16\nlearning_rate: 2.0e-05\n"
        "lr_scheduler_type: cosine\nreward_funcs:\n- accuracy\nmax_steps: 5\nhub_id: null\n"
    )
    result = translated(text)
    assert (result.recipe, keys(result.missing)) == ("grpo", ["reward_funcs"])
    assert result.overrides == {
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.train": "hub:open-r1/OpenR1-Math",
        "rollout.samples": "16",
        "optimizer.lr": "2e-05",
        "optimizer.schedule": "cosine",
        "training.steps": "5",
    }
    printed(text, tmp_path, capsys, "config.yaml")


# ---- flags of TRL


@tabled("command, recipe, overrides")
def test_flags_of_a_command(command, recipe, overrides, tmp_path, capsys):
    result = translated(command)
    assert (result.recipe, result.overrides, result.missing) == (recipe, overrides, [])
    printed(command, tmp_path, capsys)


# ---- literals of Python


@tabled("script, overrides, to_set")
def test_literals_are_read_and_the_others_are_to_be_set(script, overrides, to_set):
    result = translated(script)
    assert (result.overrides, keys(result.missing)) == (overrides, to_set)


@pytest.mark.parametrize(
    "script",
    [
        "lora = LoraConfig({})\nDPOTrainer(args=DPOConfig(), peft_config=lora)",
        "DPOTrainer(args=DPOConfig(), peft_config=peft.LoraConfig({}))",
        "model = get_peft_model(model, LoraConfig({}))\nDPOConfig()",
    ],
)
def test_lora_of_peft(script):
    result = translated(
        script.format(
            "r=16, lora_alpha=64, target_modules=['q_proj', 'v_proj'], lora_dropout=0.05, "
            "bias='none'"
        )
    )
    assert keys(result.missing) == ["lora_dropout"]
    assert result.overrides == {
        "model.lora.rank": "16",
        "model.lora.alpha": "64",
        "model.lora.targets": "q_proj,v_proj",
    }
    result = translated(script.format("r=R, use_rslora=True, task_type=TaskType.A"))
    assert result.overrides == {"model.lora.rank": "8", "model.lora.alpha": "8"}  # PEFT's
    assert keys(result.missing) == ["r of LoraConfig", "target_modules of LoRA", "use_rslora"]


def test_what_is_to_be_set_is_printed_beside_the_command(tmp_path, capsys):
    script = "GRPOConfig(learning_rate=args.lr, push_to_hub=True)"
    out = printed(script, tmp_path, capsys, "run.py")
    assert "\n# set it: learning_rate (optimizer.lr)\n" in out
    assert "\n# no equivalent: push_to_hub=True: postgrad push" in out


def test_an_argument_of_the_script_is_to_be_set(tmp_path, capsys):
    settings = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_files=$DATA/a"
    script = f"python3 -m verl.trainer.main_ppo {settings} trainer.default_local_dir=$2"
    out = printed(script, tmp_path, capsys, "run.sh")
    assert "\n# set it: runs=$2\n" in out and "data.train=$DATA/a" in out
    assert "runs=$2" not in out.partition("#")[0]


def test_python_that_cannot_be_parsed_is_refused_with_its_line(tmp_path, capsys):
    with refused("damaged", shows="line 2"):
        read_settings("from trl import GRPOConfig\nGRPOConfig(beta=)\n")
    script = tmp_path / "run.py"
    script.write_text("import trl\n\n!pip install trl\n")
    assert main(["import", str(script)]) == 2
    assert "line 3" in capsys.readouterr().err


def test_a_script_whose_config_is_its_command_line_says_so():
    text = "parser = TrlParser((ScriptArguments, DPOConfig))\nargs = parser.parse_args()\n"
    with refused("missing"):
        read_settings(text, is_python=True)
