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
