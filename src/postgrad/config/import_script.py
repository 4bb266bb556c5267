"""Translates launch scripts of verl, LUFFY, BuPO and Classmate-CoT, and TRL configs.

`read_settings` finds the settings in a script, `translate` turns them into a recipe and overrides
and lists what has no equivalent. Nothing of a script is executed.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from postgrad.config.import_names import (
    ADVANTAGES,
    KL_TYPES,
    LOSSES,
    NAMES,
    NOT_NEEDED,
    OF_CRITIC,
    TRL_RECIPES,
)
from postgrad.config.import_trl import read_trl_yaml, translate_trl
from postgrad.errors import ConfigError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*|\"\")\s*$")
_SETTING = re.compile(
    r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\$\(\([^\n]*?\)\)|\S*)"
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/()-]+)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # the shell's division of whole numbers
}


@dataclass
class Translation:
    """`recipe` and `overrides` make the command; `missing` has "key=value: reason" lines."""

    recipe: str
    overrides: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        overrides = [f"{key}={_quoted(value)}" for key, value in self.overrides.items()]
        return " \\\n  ".join([f"postgrad train {self.recipe}", *overrides])


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
        trl = read_trl_yaml(text)
        if trl is not None:
            return trl
        raise ConfigError(
            "no settings found: neither section.key=value arguments (verl and its forks) nor a "
            "call such as GRPOConfig(...) or a YAML file with its arguments (TRL)"
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
    try:
        return _ARITHMETIC.sub(lambda match: str(_calculate(match[1])), value)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return value


def _calculate(expression: str) -> int:
    """The value of a shell expression of whole numbers with + - * /."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.unparse(node))


def _read_trl(text: str) -> tuple[str, dict[str, str]] | None:
    """The keyword arguments of the first call of a TRL config; None if there is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in TRL_RECIPES:
            arguments = [(word.arg, ast.unparse(word.value)) for word in node.keywords]
            return name, {key: value.strip("'\"") for key, value in arguments if key}
    return None


def translate(kind: str, settings: dict[str, str]) -> Translation:
    """The recipe and overrides that equal a script's settings, and what has no equivalent."""
    if kind != "verl":
        return Translation(*translate_trl(kind, settings))
    result = Translation(_recipe_of(settings))
    for key, value in settings.items():
        if key.startswith(OF_CRITIC) and result.recipe != "ppo":
            continue
        if key in NAMES:
            _copy(result, NAMES[key], value)
        elif not key.endswith(NOT_NEEDED):
            try:
                _translate_special(result, key, key.rpartition(".")[2], value, settings)
            except ValueError:  # not a number, such as a variable that the script does not set
                result.missing.append(f"{key}={value}")
    return result


def _copy(result: Translation, name: str, value: str) -> None:
    """Sets the setting `name` to the value of verl's, written as it is written here."""
    if name in ("data.train", "data.validation") and value.startswith("["):
        files = [file.strip().strip("\"'") for file in value.strip("[]").split(",")]
        value = ",".join(files)
    if name == "optimizer.warmup_steps" and value.startswith("-"):  # verl's -1 is "not set"
        return
    result.overrides[name] = _lower_bool(value)


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
        return "luffy_on_policy" if re.fullmatch(r"0+(\.0*)?", ratio) else "luffy"
    estimator = settings.get("algorithm.adv_estimator", "gae")
    if "classmate" in keys:
        return "classmate_gdpo" if estimator == "gdpo" else "classmate_sycophancy"
    return "ppo" if estimator == "gae" else "grpo"


def _translate_special(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """Settings whose value or name depends on others. Raises ValueError for a wrong number."""
    overrides = result.overrides
    is_true = value.lower() == "true"
    batch = settings.get("data.train_batch_size", "")
    if "kl" in leaf or "kl_ctrl" in key:
        _translate_kl(result, key, leaf, value, settings)
    elif leaf == "ppo_mini_batch_size" and key.startswith("actor") and batch:
        overrides["training.updates_per_step"] = str(max(1, int(batch) // int(value)))
    elif leaf == "filter_overlong_prompts":
        if is_true:
            overrides["data.overlong"] = "drop"
    elif leaf == "truncation":
        overrides.setdefault("data.overlong", value)
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
    elif "filter_groups" in key or "overlong_buffer" in key:
        _translate_dapo(result, key, leaf, value, settings)
    elif "custom_reward_function" in key:
        section = key.rpartition(".")[0]
        path = settings.get(f"{section}.path", "null")
        if path != "null":
            name = settings.get(f"{section}.name", "compute_score")
            overrides["reward.verifier"] = f"{path}:{name}"
    elif leaf == "rollout_is" and value in ("token", "sequence"):
        overrides["method.correction"] = value
    elif leaf == "rollout_is_threshold":
        if "method.correction" in overrides:
            overrides["method.correction_bound"] = value
    elif leaf == "off_policy_reshape" and value.startswith("p_div_p_"):
        overrides["method.off_shape"] = "p_div_p"
        overrides["method.off_options.gamma"] = value.removeprefix("p_div_p_")
    elif leaf == "loss_remove_clip":
        if is_true:
            overrides |= {"method.clip_low": "inf", "method.clip_high": "inf"}
    else:
        result.missing.append(f"{key}={value}")


def _translate_kl(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """The KL penalty: in the loss or in the reward, each with an estimator and a coefficient."""
    overrides = result.overrides
    in_loss = settings.get("actor_rollout_ref.actor.use_kl_loss", "").lower() == "true"
    in_reward = settings.get("algorithm.use_kl_in_reward", "").lower() == "true"
    if leaf == "use_kl_loss":
        overrides["method.kl"] = "loss" if in_loss else overrides.get("method.kl", "none")
    elif leaf == "use_kl_in_reward":
        if in_reward and not in_loss:
            penalty = settings.get("algorithm.kl_penalty", "kl")  # verl's default
            estimator = KL_TYPES.get(penalty, "k1")
            overrides |= {"method.kl": "reward", "method.kl_estimator": estimator}
        elif in_reward:
            result.missing.append(f"{key}={value} beside use_kl_loss=True")
    elif leaf == "kl_loss_coef":
        if in_loss:
            overrides["method.kl_coef"] = value
    elif leaf == "kl_loss_type" and value in KL_TYPES:
        if in_loss:
            overrides["method.kl_estimator"] = KL_TYPES[value]
    elif leaf == "kl_coef":
        if in_reward and not in_loss:
            overrides["method.kl_coef"] = value
    elif leaf == "type":
        if value == "adaptive" and in_reward and not in_loss:
            target = settings.get("algorithm.kl_ctrl.target_kl", "0.1")
            overrides["method.kl_target"] = target
    elif leaf not in ("kl_penalty", "target_kl") and (leaf, value) != ("horizon", "10000"):
        result.missing.append(f"{key}={value}")


def _translate_dapo(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """DAPO's filter of groups and its penalty for overlong responses."""
    section = key.rpartition(".")[0]
    if settings.get(f"{section}.enable", "").lower() != "true":
        return
    if leaf == "enable" and "filter_groups" in key:
        times = settings.get(f"{section}.max_num_gen_batches", "10")
        result.overrides["method.max_refills"] = str(max(1, int(times) - 1))
    elif leaf == "metric":
        if value == "seq_final_reward":
            result.overrides["method.refill_by"] = "reward"
    elif leaf == "len":
        result.overrides["method.overlong_buffer"] = value
    elif leaf != "enable" and (leaf != "penalty_factor" or float(value) != 1):
        result.missing.append(f"{key}={value}")


def _lower_bool(value: str) -> str:
    return value.lower() if value in ("True", "False") else value
