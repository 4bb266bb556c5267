"""`postgrad import` of OpenRLHF's launch scripts, with the flags of today and the old ones."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError

PPO = """
set -x
MODEL=meta/Llama
ALGO_ARGS=(
   --algo.advantage.estimator group_norm
   # --algo.kl.estimator k2
   --algo.kl.use_loss
   --algo.kl.estimator k3
   --algo.kl.init_coef 1e-3
   --actor.eps_clip_low_high 0.2 0.27
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 \\
   --actor.num_gpus_per_node 4 \\
   --actor.model_name_or_path ${MODEL} \\
   --reward.model_name_or_path org/rm \\
   --data.prompt_dataset org/prompts --data.input_key question --data.label_key answer \\
   --data.apply_chat_template \\
   --data.max_len 2048 --rollout.max_new_tokens 1024 \\
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \\
   --actor.adam.lr 5e-7 --actor.adam.betas 0.9 0.99 --actor.lr_scheduler constant \\
   --critic.adam.lr 9e-6 --vllm.num_engines 4 --ds.zero_stage 3 \\
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \\
   --reward.normalize_enable --my.flag 7 \\
   "${ALGO_ARGS[@]}" 2>&1 | tee log.txt
"""
FLAT = """
python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --advantage_estimator reinforce_baseline \\
  --prompt_max_len 100 --generate_max_len 50 --n_samples_per_prompt 4 --rollout_batch_size 8 \\
  --train_batch_size 32 --init_kl_coef 0 --actor_learning_rate 1e-6 --l2 0.1 --bf16 --flash_attn \\
  --actor_num_gpus_per_node 1 --prompt_data rows.jsonl --colocate_all_models --max_norm 0.5
"""


def test_a_script_of_train_ppo_ray():
    result = translate(*read_settings(PPO))
    assert result.recipe == "grpo"
    assert result.overrides == {
        "data.train": "hub:org/prompts:train:question=prompt:answer=ground_truth",
        "training.updates_per_step": "4",
        "rollout.max_response_tokens": "1024",
        "data.max_prompt_tokens": "1024",
        "cluster": "ray",
        "cluster.workers": "4",
        "method.kl": "loss",
        "method.kl_estimator": "k3",
        "method.kl_coef": "1e-3",
        "method.clip_low": "0.2",
        "method.clip_high": "0.27",
        "method.dual_clip": "inf",
        "reward.verifier": "model:org/rm",
        "method.max_refills": "9",
        "model.path": "meta/Llama",
        "training.problems_per_step": "128",
        "rollout.samples": "8",
        "optimizer.lr": "5e-7",
        "optimizer.betas": "[0.9,0.99]",
        "optimizer.schedule": "constant",
        "optimizer.final_lr_ratio": "0.0",
        "optimizer.warmup_steps": "0",  # the schedule constant of transformers has no warm-up
    }
    names = [line.split()[0].rstrip(":") for line in result.missing]
    assert names == ["--reward.normalize_enable", "--my.flag"]
    assert all(": " in line for line in result.missing)


def test_flags_without_sections():
    result = translate(*read_settings(FLAT))
    assert result.recipe == "grpo"
    assert [line.partition(":")[0] for line in result.missing] == ["weight_decay=0.1"]
    assert result.overrides == {
        "method.advantage": "reinforce_pp_baseline",
        "data.train": "rows.jsonl:input=prompt",
        "training.updates_per_step": "1",
        "rollout.max_response_tokens": "50",
        "method.kl": "none",
        "method.clip_low": "0.2",
        "method.clip_high": "0.2",
        "method.dual_clip": "inf",
        "model.path": "org/m",
        "data.max_prompt_tokens": "100",
        "rollout.samples": "4",
        "training.problems_per_step": "8",
        "optimizer.lr": "1e-6",
        "optimizer.weight_decay": "0.1",
        "optimizer.max_grad_norm": "0.5",
        "data.template": "plain",
    }


def of(program: str, flags: str):
    text = f"read -r -d '' commands <<EOF\nopenrlhf.cli.{program} {flags}\nEOF\ndeepspeed $commands"
    return translate(*read_settings(text))


def test_ppo_has_a_critic_and_its_defaults():
    result = of("train_ppo_ray", "--actor.model_name_or_path m --reward.model_name_or_path r")
    overrides = result.overrides
    assert (result.recipe, overrides["method.critic_path"]) == ("ppo", "r")
    assert (overrides["method.kl"], overrides["method.kl_coef"]) == ("reward", "0.01")
    assert overrides["training.updates_per_step"] == "8"  # 1,024 responses, 128 per update
    assert [line.split()[0] for line in result.missing] == ["--data.max_len"]


GROUPS = "--actor.model_name_or_path m --algo.advantage.estimator group_norm"
CORRECTED = f"{GROUPS} --algo.advantage.is_correction_enable"


def test_gspo_is_a_mean_over_responses_and_its_ratio_may_be_to_vllm():
    gspo = of("train_ppo_ray", f"{GROUPS} --actor.policy_loss_type gspo").overrides
    assert gspo["method.aggregation"] == "seq-mean-token-mean"
    assert "method.correction" not in gspo
    corrected = of("train_ppo_ray", f"{CORRECTED} --actor.policy_loss_type gspo").overrides
    assert corrected["method.correction"] == "bypass"
    assert "method.correction_bound" not in corrected


def test_corrections():
    """tis clamps weights, icepop sets those outside to 0, seq-mask-tis masks responses."""
    tis = of("train_ppo_ray", CORRECTED)
    assert tis.overrides["method.correction_bound"] == "5.0"
    assert any(line.startswith("--algo.advantage.is_correction_thr") for line in tis.missing)
    kind = f"{CORRECTED} --algo.advantage.is_correction_threshold 0.8 2 " + (
        "--algo.advantage.is_correction_type"
    )
    ice = of("train_ppo_ray", f"{kind} icepop").overrides
    assert (ice["method.correction"], ice["method.correction_bound"]) == ("token", "0.8_2")
    masked = of("train_ppo_ray", f"{kind} seq-mask-tis").overrides
    assert masked["method.correction_bound"] == "1e9"
    assert masked["method.rejection.seq_mean_k1"] == "0.8_2.0"


def test_supervised_programs():
    model = "--model.model_name_or_path m --data.apply_chat_template --data.max_len 64"
    limits = {"data.max_prompt_tokens": "64", "rollout.max_response_tokens": "64"}
    sft = of("train_sft", f"{model} --data.dataset a.jsonl --data.input_key q --data.output_key a")
    assert (
        sft.overrides == {"data.train": "a.jsonl:q=prompt:a=response", "model.path": "m"} | limits
    )
    chat = of("train_sft", f"{model} --data.dataset a.jsonl --data.input_key chat")
    assert chat.overrides["data.train"] == "a.jsonl:chat=messages"
    assert chat.overrides["method.train_on"] == "last"
    text = of("train_sft", f"{model} --data.dataset a.jsonl --model.pretrain_mode_enable")
    assert text.overrides["data.train"] == "a.jsonl:input=text"
    dpo = of("train_dpo", f"{model} --model.ipo_enable --model.beta 0.2 --data.chosen_key win")
    assert (dpo.recipe, dpo.overrides["method.loss"]) == ("dpo", "ipo")
    assert dpo.overrides["method.beta"] == "0.2"
    assert any(line.startswith("--model.ipo_enable: ") for line in dpo.missing)
    assert of("train_rm", f"{model} --model.loss_type sigmoid").recipe == "reward_model"
    kto = of("train_kto", "--pretrain m --apply_chat_template --desirable_loss_weight 1.5")
    assert (kto.recipe, kto.overrides["method.desirable_weight"]) == ("kto", "1.5")


def test_a_template_that_is_a_default_is_listed():
    result = of("train_sft", "--pretrain m --dataset a.jsonl --input_key q --output_key a")
    assert result.overrides["data.template"] == "plain"
    assert [line.split()[0] for line in result.missing] == ["--data.input_template"]


@pytest.mark.parametrize(
    "text",
    [
        "python -m openrlhf.cli.train_ppo_ray --rollout.batch_size 8 $MORE",
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --advantage_estimator best",
        "python -m openrlhf.cli.train_grpo --pretrain m",
        PPO + PPO,
    ],
)
def test_what_cannot_be_translated_is_refused(text):
    with pytest.raises(ConfigError):
        translate(*read_settings(text))


@pytest.mark.parametrize("text", [PPO.replace("--reward.model_name_or_path org/rm", ""), FLAT])
def test_printed_command_passes_the_checks(text, tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert main(["import", str(script)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("postgrad train grpo") and "needs a change" not in out, out
    assert "seed=42" in out  # OpenRLHF's defaults
    assert ("optimizer.warmup_ratio=0.03" in out) == ("lr_scheduler constant" not in text)
