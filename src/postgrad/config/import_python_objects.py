"""What a script gives TRL's trainers besides the config: models, data sets, functions."""

import ast
import re
from collections.abc import Callable

from postgrad.config.import_names import TRL_NOT_NEEDED
from postgrad.config.import_python_values import TrlConfig, is_literal, text_of

# Arguments of TRL's trainers that are objects of the script, and what to write instead.
TRL_ARGUMENTS = {
    "model": "set model.path to its name or folder",
    "reward_funcs": "set reward.verifier=FILE.py:FUNCTION, or reward= of postgrad.train",
    "train_dataset": "set data.train to its file or to hub:NAME, or data= of postgrad.train",
    "eval_dataset": "set data.validation to its file or to hub:NAME",
    "peft_config": "set model.lora.rank and model.lora.alpha",
    "quantization_config": "model.quantization=4bit keeps the frozen weights in 4 bits",
    "ref_model": "the reference is the model of model.path before the training",
    "tools": "set rollout.tools=[FILE.py:FUNCTION]",
    "environment_factory": "write an environment: environment.name=FILE.py:CLASS",
    "rollout_func": "write an environment, environment.name=FILE.py:CLASS, or an agent",
    "callbacks": "postgrad.train takes callbacks=[...] with TRL's names (docs/python.md)",
    "compute_metrics": "a validation has the metrics of its method",
    "compute_loss_func": "write a method: method=FILE.py:CLASS",
    "formatting_func": "write the texts to a file, or set data.prompt_style",
    "data_collator": "the loss never reads the prompt; rows are packed without padding",
    "optimizers": "set optimizer.kind and optimizer.schedule",
    "optimizer_cls_and_kwargs": "set optimizer.kind",
}
# The first arguments of the trainers, by the name of the trainer.
POSITIONS = {
    "GRPO": ("model", "reward_funcs"),
    "RLOO": ("model", "reward_funcs"),
    "DPO": ("model", "ref_model"),
    "KTO": ("model", "ref_model"),
}
_LOAD_DATASET = ("load_dataset", "datasets.load_dataset")
_HUB_SPLIT = re.compile(r"\w[\w.-]*/[\w.-]+:\w+")

_Look = Callable[[ast.expr], ast.expr | TrlConfig | None]


def hub_name(node: ast.expr | None, value_of: _Look) -> str:
    """OWNER/NAME:SPLIT of a split of the hub as it is; "" for anything else.

    That is `load_dataset("OWNER/NAME", split="SPLIT")` or `load_dataset("OWNER/NAME")["SPLIT"]`.
    """
    value = value_of(node) if node is not None else None
    splits: list[ast.expr] = []
    if isinstance(value, ast.Subscript):
        splits.append(value.slice)
        value = value_of(value.value)
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in _LOAD_DATASET:
        return ""
    if {word.arg for word in value.keywords} - {"split"} or len(value.args) != 1:
        return ""
    splits += [word.value for word in value.keywords]
    if len(splits) != 1:
        return ""
    texts = [one.value for one in (value.args[0], *splits) if isinstance(one, ast.Constant)]
    name = ":".join(map(str, texts))
    return name if _HUB_SPLIT.fullmatch(name) else ""


def model_name(
    node: ast.expr, value_of: _Look, resolve: Callable[[ast.expr], ast.expr]
) -> tuple[dict[str, str], list[str]]:
    """(arguments of TRL's configs, notes) of a trainer's model; ({}, []) if its name is not known.

    The model is a name, or `AutoModelForCausalLM.from_pretrained(NAME, ...)`.
    """
    value = value_of(node)
    if not isinstance(value, ast.Call):
        name = resolve(node)
        is_name = isinstance(name, ast.Constant) and isinstance(name.value, str)
        return ({"model_name_or_path": text_of(name)} if is_name else {}), []
    name = resolve(value.args[0]) if value.args else None
    is_loaded = ast.unparse(value.func).endswith(".from_pretrained")
    if not is_loaded or not isinstance(name, ast.Constant):
        return {}, []
    found = {"model_name_or_path": text_of(name)}
    notes = [f"{ast.unparse(one)} of from_pretrained" for one in value.args[1:]]
    for word in value.keywords:
        one = resolve(word.value)
        if word.arg == "quantization_config" and quantization(one, value_of):
            found |= quantization(one, value_of)
        elif word.arg and is_literal(one):
            found[word.arg] = text_of(one)
        elif word.arg not in TRL_NOT_NEEDED:
            notes.append(f"{ast.unparse(word)} of from_pretrained")
    return found, notes


def quantization(node: ast.expr | None, value_of: _Look) -> dict[str, str]:
    """The bits of a BitsAndBytesConfig as arguments of TRL's ModelConfig; {} if not known."""
    value = value_of(node) if node is not None else None
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).endswith("AndBytesConfig"):
        return {}
    return {
        word.arg: "True"
        for word in value.keywords
        if word.arg in ("load_in_4bit", "load_in_8bit") and ast.unparse(word.value) == "True"
    }
