"""`postgrad import` of TRL's configs: the command, and what differs there."""

import pytest
from imported import keys, printed, translated
from tables import table

from postgrad.translate import defaults_of, translate

# (call, overrides, arguments without an equivalent)
GRPO = table(__file__, "trl_grpo")
OTHERS = table(__file__, "trl_others")
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
