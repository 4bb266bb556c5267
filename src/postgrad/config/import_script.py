"""Translates launch scripts of verl, LUFFY, BuPO and Classmate-CoT, and TRL configs.

`read_settings` finds the settings in a script, `translate` turns them into a recipe and overrides
and lists what has no equivalent. Nothing of a script is executed.
"""

import ast
import re
from dataclasses import dataclass, field

from postgrad.config.import_names import ADVANTAGES, KL_TYPES, LOSSES, NAMES, NOT_NEEDED, TRL_NAMES
from postgrad.errors import ConfigError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*|\"\")\s*$")
_SETTING = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\S*)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/()-]+)\)\)")
_TRL_CONFIG = re.compile(r"(GRPO|SFT|DPO|PPO|RLOO|KTO|ORPO|Reward)Config")


@dataclass
class Translation:
    """`recipe` and `overrides` make the command; `missing` has "key=value: reason" lines."""

    recipe: str
    overrides: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        words = [f"{key}={_quoted(value)}" for key, value in self.overrides.items()]
        return " \\\n  ".join([f"postgrad train {self.recipe}", *words])


def _quoted(value: str) -> str:
    return f"'{value}'" if re.search(r"[\s\[\]{}&;|<>]", value) else value


def read_settings(text: str) -> tuple[str, dict[str, str]]:
    """(kind, settings) of a script; kind is `verl` for key=value scripts, or TRL's config class.

    Raises:
        ConfigError: the text has no settings of a known kind.
    """
    trl = _read_trl(text)
    if trl is not None:
        return trl
    settings = _read_shell(text)
    if not settings:
        raise ConfigError(
            "no settings found: neither section.key=value arguments (verl and its forks) nor a "
            "call such as GRPOConfig(...) (TRL)"
        )
    return "verl", settings


def _read_shell(text: str) -> dict[str, str]:
    """The section.key=value arguments, with the script's own variables filled in."""
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    variables: dict[str, str] = {}
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line.split(" #")[0])
        if match and "." not in match[1]:
            variables[match[1]] = _expand(match[2].strip().strip("\"'"), variables)
    joined = text.replace("\\\n", " ")
    settings: dict[str, str] = {}
    for match in _SETTING.finditer(joined):
        settings[match[1]] = _expand(match[2], variables).strip("\"'")
    return settings


def _expand(value: str, variables: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    value = _VARIABLE.sub(replace, value)
    return _ARITHMETIC.sub(lambda match: str(_calculate(match[1])), value)


def _calculate(expression: str) -> int:
    """The value of a shell product or sum of whole numbers."""
    total = 0
    for term in expression.replace(" ", "").replace("(", "").replace(")", "").split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return total


def _read_trl(text: str) -> tuple[str, dict[str, str]] | None:
    """The keyword arguments of the first call of a TRL config; None if there is none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if _TRL_CONFIG.fullmatch(name):
            arguments = [(word.arg, ast.unparse(word.value)) for word in node.keywords]
            return name, {key: value.strip("'\"") for key, value in arguments if key}
    return None


def translate(kind: str, settings: dict[str, str]) -> Translation:
    """The recipe and overrides that equal a script's settings, and what has no equivalent."""
    if kind != "verl":
        return _translate_trl(kind, settings)
    result = Translation(_recipe_of(settings))
    batch = settings.get("data.train_batch_size", "")
    for key, value in settings.items():
        leaf = key.rpartition(".")[2]
        if key in NAMES:
            result.overrides[NAMES[key]] = _lower_bool(value)
        elif any(key.endswith(ending) for ending in NOT_NEEDED):
            continue
        else:
            _translate_special(result, key, leaf, value, batch, settings)
    return result


def _recipe_of(settings: dict[str, str]) -> str:
    keys = " ".join(settings)
    if "internal_layer" in keys:
        return "bupo"
    if "exp_metric" in keys or "exp_bucket" in keys or "experience" in keys:
        return "exgrpo"
    if "off_policy_reshape" in keys or "use_off_policy_loss" in keys:
        if settings.get("actor_rollout_ref.actor.use_sft_multitask_loss") == "True":
            return "luffy_rl_sft"
        ratio = settings.get("actor_rollout_ref.rollout.max_prefix_ratio", "1.0")
        return "luffy_on_policy" if float(ratio) == 0 else "luffy"
    estimator = settings.get("algorithm.adv_estimator", "gae")
    if "classmate" in keys:
        return "classmate_gdpo" if estimator == "gdpo" else "classmate_sycophancy"
    return "ppo" if estimator == "gae" else "grpo"


def _translate_special(
    result: Translation, key: str, leaf: str, value: str, batch: str, settings: dict[str, str]
) -> None:
    """Settings whose value or name depends on others."""
    overrides = result.overrides
    is_true = value.lower() == "true"
    if leaf == "ppo_mini_batch_size" and key.startswith("actor") and batch:
        overrides["training.updates_per_step"] = str(max(1, int(batch) // int(value)))
    elif leaf == "filter_overlong_prompts":
        if is_true:
            overrides["data.overlong"] = "drop"
    elif leaf == "truncation":
        overrides.setdefault("data.overlong", value)
    elif leaf == "use_kl_loss":
        overrides["method.kl"] = "loss" if is_true else "none"
    elif leaf == "use_kl_in_reward":
        if is_true:
            overrides["method.kl"] = "reward"
    elif leaf == "kl_loss_coef":
        if settings.get("actor_rollout_ref.actor.use_kl_loss", "").lower() == "true":
            overrides["method.kl_coef"] = value
    elif leaf == "kl_loss_type" and value in KL_TYPES:
        if settings.get("actor_rollout_ref.actor.use_kl_loss", "").lower() == "true":
            overrides["method.kl_estimator"] = KL_TYPES[value]
    elif leaf == "kl_coef":
        if settings.get("algorithm.use_kl_in_reward", "").lower() == "true":
            overrides["method.kl_coef"] = value
    elif leaf == "clip_ratio":
        overrides.setdefault("method.clip_low", value)
        overrides.setdefault("method.clip_high", value)
    elif leaf == "adv_estimator" and value in ADVANTAGES:
        if result.recipe == "grpo" and ADVANTAGES[value] != "grpo":
            overrides["method.advantage"] = ADVANTAGES[value]
    elif leaf == "loss_mode" and value in LOSSES:
        overrides["method.loss"] = LOSSES[value]
    elif leaf == "internal_layer":
        overrides["method.num_blocks"] = str(int(value) + 1)
    elif leaf in ("save_freq", "test_freq"):
        name = "checkpoint_every" if leaf == "save_freq" else "validate_every"
        if int(value) > 0:
            overrides[f"training.{name}"] = value
    elif leaf == "n_gpus_per_node":
        num_gpus = int(value) * int(settings.get("trainer.nnodes", "1"))
        if num_gpus > 1:
            overrides |= {"cluster": "ray", "cluster.workers": str(num_gpus)}
    elif key == "actor_rollout_ref.rollout.top_k":
        if int(value) > 0:  # verl's -1 keeps all tokens
            overrides["rollout.top_k"] = value
    elif leaf == "logger":
        for tracker in ("wandb", "tensorboard", "trackio"):
            if tracker in value:
                overrides["track"] = tracker
    elif leaf == "enable" and "filter_groups" in key:
        if is_true:
            times = settings.get("algorithm.filter_groups.max_num_gen_batches", "10")
            overrides["method.max_refills"] = str(max(1, int(times) - 1))
    elif leaf == "off_policy_reshape" and value.startswith("p_div_p_"):
        overrides["method.off_shape"] = "p_div_p"
        overrides["method.off_options.gamma"] = value.removeprefix("p_div_p_")
    elif leaf == "loss_remove_clip":
        if is_true:
            overrides |= {"method.clip_low": "inf", "method.clip_high": "inf"}
    else:
        result.missing.append(f"{key}={value}")


def _translate_trl(kind: str, settings: dict[str, str]) -> Translation:
    recipes = {"SFTConfig": "sft", "DPOConfig": "dpo", "PPOConfig": "ppo", "RLOOConfig": "rloo"}
    result = Translation(recipes.get(kind, kind.removesuffix("Config").lower()))
    for key, value in settings.items():
        if key in TRL_NAMES:
            result.overrides[TRL_NAMES[key]] = _lower_bool(value)
        elif key == "beta":
            if result.recipe == "dpo":
                result.overrides["method.beta"] = value
            elif float(value):
                result.overrides |= {"method.kl": "loss", "method.kl_coef": value}
        else:
            result.missing.append(f"{key}={value}")
    return result


def _lower_bool(value: str) -> str:
    return value.lower() if value in ("True", "False") else value
