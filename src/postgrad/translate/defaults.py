"""What a script means by the settings that it leaves out.

`postgrad import` adds the defaults of the project that differ from the recipe's.
"""

from collections.abc import Mapping

from postgrad.translate.table import read_table

_LORA_ALPHA = {"verl": "16", "verl_sft": "16", "TRL": "32"}
_VERL_ROWS_PER_UPDATE = 256  # problems
_TRL_ROWS = 8  # responses per process and step


def defaults_of(kind: str, recipe: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the other project's values of the settings that a script leaves out; {} if not known.

    Recipes of verl's forks have the forks' values.

    Args:
        kind: what kind of script it is, as read_settings says.
        recipe: the recipe here.
        overrides: what the script sets.
    """
    project = "verl" if kind.startswith("verl") else "trl"
    known = read_table(project).defaults
    if kind == "verl" and recipe not in ("ppo", "grpo"):
        return {}
    values = (known["all"] if project == "trl" else {}) | known[kind]
    if recipe == "ppo":
        values = values | known["critic"]
    samples = overrides.get("rollout.samples", "")
    if kind in ("GRPOConfig", "RLOOConfig") and samples.isdecimal() and int(samples):
        values["training.problems_per_step"] = str(max(1, _TRL_ROWS // int(samples)))
    if kind == "GRPOConfig" and overrides.get("method.kl") == "loss":
        values["method.kl_ratio"] = "true"
    if kind == "verl":
        problems = overrides.get("training.problems_per_step", values["training.problems_per_step"])
        if problems.isdecimal():
            updates = max(1, int(problems) // _VERL_ROWS_PER_UPDATE)
            values["training.updates_per_step"] = str(updates)
    if overrides.get("model.lora.rank", "0") != "0":
        values["model.lora.alpha"] = _LORA_ALPHA.get(kind, _LORA_ALPHA["TRL"])
    return {key: value for key, value in values.items() if not _is_idle(key, overrides)}


def _is_idle(key: str, overrides: Mapping[str, str]) -> bool:
    """Return whether what the script sets replaces a default, or leaves it without effect."""
    if key in overrides:
        return True
    if key == "training.epochs":
        return "training.steps" in overrides
    if key.startswith("training.validation"):
        return "data.validation" not in overrides
    if key.startswith("method.kl_"):
        return overrides.get("method.kl") == "none"
    return key == "method.dual_clip" and overrides.get("method.loss", "ppo_clip") != "ppo_clip"
