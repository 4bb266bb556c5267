"""Defaults of verl and TRL: what a script means by the settings that it leaves out.

The values are those of verl in January 2026 and TRL 1.16 (October 2026), written as settings here.
`postgrad import` adds those that differ from the recipe's.
"""

from collections.abc import Mapping


def _lengths(limit: int) -> dict[str, str]:
    """A limit of prompt and response together, which each has here."""
    return {"data.max_prompt_tokens": str(limit), "rollout.max_response_tokens": str(limit)}


_VERL = {
    "training.problems_per_step": "1024",
    "training.epochs": "30",
    "training.ppo_epochs": "1",
    "training.validation_temperature": "0",
    "data.max_prompt_tokens": "512",
    "data.overlong": "error",
    "rollout.samples": "1",
    "rollout.max_response_tokens": "512",
    "rollout.temperature": "1.0",
    "optimizer.lr": "1e-6",
    "optimizer.weight_decay": "0.01",
    "optimizer.max_grad_norm": "1.0",
    "optimizer.schedule": "constant",
    "method.aggregation": "token-mean",
}
_VERL_SFT = {
    "training.problems_per_step": "256",
    "training.epochs": "4",
    "data.max_prompt_tokens": "1024",
    "rollout.max_response_tokens": "1024",
    "optimizer.lr": "1e-5",
    "optimizer.betas": "[0.9,0.95]",
    "optimizer.weight_decay": "0.01",
    "optimizer.warmup_ratio": "0.1",
    "optimizer.max_grad_norm": "1.0",
    "optimizer.schedule": "cosine",
}
# Of transformers.TrainingArguments; 8 rows per device and step.
_TRAINER = {
    "training.epochs": "3",
    "optimizer.weight_decay": "0.0",
    "optimizer.max_grad_norm": "1.0",
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": "0",
    "seed": "42",
}
_TRL_PAIRS = _TRAINER | _lengths(1024) | {"training.problems_per_step": "8", "optimizer.lr": "1e-6"}

# By the kind of import_script.read_settings.
DEFAULTS: dict[str, dict[str, str]] = {
    "verl": _VERL,
    "verl_sft": _VERL_SFT,
    "GRPOConfig": _TRAINER
    | {
        "training.problems_per_step": "1",
        "optimizer.lr": "1e-6",
        "rollout.samples": "8",
        "rollout.max_response_tokens": "512",
        "method.aggregation": "token-mean",
        "method.dual_clip": "inf",
    },
    "RLOOConfig": _TRAINER
    | {
        "training.problems_per_step": "4",
        "optimizer.lr": "1e-6",
        "rollout.samples": "2",
        "rollout.max_response_tokens": "512",
        "method.kl": "reward",
        "method.kl_estimator": "k1",
        "method.kl_coef": "0.05",
    },
    "SFTConfig": _TRAINER
    | _lengths(1024)
    | {"training.problems_per_step": "8", "optimizer.lr": "2e-5"},
    "DPOConfig": _TRL_PAIRS | {"method.beta": "0.1"},
    "KTOConfig": _TRL_PAIRS | {"method.beta": "0.1", "data.shuffle": "false"},
    "RewardConfig": _TRL_PAIRS | {"optimizer.lr": "1e-4", "method.centering": "0.0"},
}
# Of the critic, which only the recipe ppo has.
_CRITIC = {"method.lam": "1.0", "method.critic_lr": "1e-5", "method.critic_clip": "0.5"}
LORA_ALPHA = {"verl": "16", "verl_sft": "16", "TRL": "32"}
VERL_ROWS_PER_UPDATE = 256  # problems
TRL_ROWS = 8  # responses per process and step


def defaults_of(kind: str, recipe: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """The other project's values of the settings that a script leaves out; {} if not known.

    Recipes of verl's forks have the forks' values.

    Args:
        kind: what kind of script it is, as read_settings says.
        recipe: the recipe here.
        overrides: what the script sets.
    """
    if kind not in DEFAULTS or (kind == "verl" and recipe not in ("ppo", "grpo")):
        return {}
    values = dict(DEFAULTS[kind])
    if recipe == "ppo":
        values |= _CRITIC
    if "training.steps" in overrides:
        values.pop("training.epochs")
    if "optimizer.warmup_steps" in overrides:
        values.pop("optimizer.warmup_ratio", None)
    if "data.validation" not in overrides:
        values = {key: one for key, one in values.items() if "training.validation" not in key}
    if overrides.get("method.kl") == "none":
        values = {key: one for key, one in values.items() if not key.startswith("method.kl_")}
    if overrides.get("method.loss", "ppo_clip") != "ppo_clip":
        values.pop("method.dual_clip", None)
    if kind == "GRPOConfig" and overrides.get("method.kl") == "loss":
        values["method.kl_ratio"] = "true"
    samples = overrides.get("rollout.samples", "")
    if kind in ("GRPOConfig", "RLOOConfig") and samples.isdecimal() and int(samples):
        values["training.problems_per_step"] = str(max(1, TRL_ROWS // int(samples)))
    if kind == "verl":
        problems = overrides.get("training.problems_per_step", values["training.problems_per_step"])
        if problems.isdecimal():
            updates = max(1, int(problems) // VERL_ROWS_PER_UPDATE)
            values["training.updates_per_step"] = str(updates)
    if overrides.get("model.lora.rank", "0") != "0":
        values["model.lora.alpha"] = LORA_ALPHA.get(kind, LORA_ALPHA["TRL"])
    return {key: value for key, value in values.items() if key not in overrides}
