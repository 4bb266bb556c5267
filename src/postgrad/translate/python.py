"""Python scripts of TRL: the literal arguments of their config, their LoRA and their trainer.

Nothing of a script is executed or followed. An argument whose value is no literal has a line.
"""

import ast
import re

from postgrad.errors import Conflict, Damaged
from postgrad.translate.result import SET_IT
from postgrad.translate.table import read_table
from postgrad.translate.trl import COUNTS, RECIPES, SIZES

_CONFIG_CALL = re.compile(rf"\b(?:{'|'.join(RECIPES)})\(")
# The first arguments of the trainers; those of other trainers are objects too.
_POSITIONS = {"GRPO": ("model", "reward_funcs"), "RLOO": ("model", "reward_funcs")}
# Arguments of PEFT's LoraConfig, and their names in TRL's ModelConfig.
_PEFT_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
_PEFT_DEFAULTS = {"lora_r": "8", "lora_alpha": "8", "lora_dropout": "0"}


def read_trl_python(
    text: str, is_python: bool = False
) -> tuple[str, dict[str, str], list[str]] | None:
    """Return (class, arguments, notes) of the TRL config of a script; None if there is none.

    Args:
        is_python: whether the text must be Python; else it may be a shell script.

    Raises:
        ConfigError: there are several configs, or the text is Python that cannot be parsed.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        if is_python or _CONFIG_CALL.search(text):
            raise Damaged(
                f"the file cannot be parsed as Python: {error.msg} (line {error.lineno})"
            ) from error
        return None
    except (ValueError, RecursionError, MemoryError):
        return None
    calls = [(_name(node), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [(name, call) for name, call in calls if name in RECIPES]
    if not configs:
        return None
    if len(configs) > 1:
        names = ", ".join(name for name, _ in configs)
        raise Conflict(f"the file has {len(configs)} configs ({names}); keep one of them")
    kind, config = configs[0]
    settings, unread = _read_config(config)
    table = read_table("trl")
    notes = [_to_set(key) for key in [*unread, *_assigned(tree)] if not table.is_not_needed(key)]
    for name, call in calls:
        if name == "LoraConfig":
            _read_lora(call, settings, notes)
    for name, call in calls:
        if f"{name.removesuffix('Trainer')}Config" in RECIPES:
            _read_trainer(call, name.removesuffix("Trainer"), settings, notes)
    return kind, settings, list(dict.fromkeys(notes))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _to_set(key: str, here: str = "") -> str:
    """Return the line of an argument that has no literal value, with its setting here."""
    here = here or read_table("trl").names.get(key, "")
    return f"{SET_IT}{key} ({here})" if here else f"{SET_IT}{key}"


def _literals(call: ast.Call) -> tuple[dict[str, str], list[str]]:
    """Return the literal keyword arguments of a call as texts, and the names of the others."""
    found: dict[str, str] = {}
    unread: list[str] = []
    for word in call.keywords:
        try:
            found[word.arg or ""] = str(ast.literal_eval(word.value))
        except (ValueError, TypeError):
            unread.append(word.arg or f"**{ast.unparse(word.value)}")
    return found, unread


def _read_config(call: ast.Call) -> tuple[dict[str, str], list[str]]:
    settings, unread = _literals(call)
    for i, value in enumerate(call.args):
        if i == 0 and isinstance(value, ast.Constant):
            settings["output_dir"] = str(value.value)
        else:
            unread.append("output_dir" if i == 0 else ast.unparse(value))
    if set(unread) & set(SIZES):  # without one of them, the other sizes mean something else
        unread += [key for key in COUNTS if settings.pop(key, None) is not None]
    return settings, unread


def _assigned(tree: ast.AST) -> list[str]:
    """Return the names of arguments that the script sets later, as `args.learning_rate = 1e-5`."""
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr in (*read_table("trl").names, *COUNTS)
    ]


def _read_lora(call: ast.Call, settings: dict[str, str], notes: list[str]) -> None:
    """Add the arguments of PEFT's LoraConfig by the names of TRL's ModelConfig."""
    settings |= _PEFT_DEFAULTS
    given, unread = _literals(call)
    names = read_table("trl").names
    for key, value in given.items():
        if key in _PEFT_NAMES and value != "None":
            settings[_PEFT_NAMES[key]] = value
        elif key != "task_type" and value not in ("None", "False", "none"):
            notes.append(f"{key}={value} of LoraConfig")
    for key in unread:
        if key != "task_type":
            here = names.get(_PEFT_NAMES.get(key, ""), "")
            notes.append(_to_set(f"{key} of LoraConfig", here))


def _read_trainer(call: ast.Call, kind: str, settings: dict[str, str], notes: list[str]) -> None:
    """Add the name of the model; what else the trainer is given has a line."""
    objects = read_table("trl").objects
    given = dict(zip(_POSITIONS.get(kind, ("model",)), call.args, strict=False))
    given |= {word.arg: word.value for word in call.keywords if word.arg}
    model = given.get("model")
    if isinstance(model, ast.Constant) and isinstance(model.value, str):
        settings.setdefault("model_name_or_path", model.value)
        del given["model"]
    if "lora_r" in settings:
        given.pop("peft_config", None)
    for key, value in given.items():
        if key in objects and ast.unparse(value) != "None":
            notes.append(_to_set(key, objects[key]))
