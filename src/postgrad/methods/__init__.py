"""Training methods: one file per algorithm. method.py has the stages that all methods share,
objective.py what runs in the model's process: the loss, and which policy it trains.

    sft, dpo, online_dpo, kto, reward_model    learn from given responses or from preferences
    ppo, grpo, luffy, exgrpo, bupo, classmate  learn from rewards
    distill                                    learn from a teacher's log-probs
    support/                                   code that several methods share

METHODS maps each name to a class. A user's own method is given as `package.module:Class` or
`file.py:Class`. Nothing registers itself at import.

May import: everything below `methods` in the layers of pyproject.toml (rollout, model, data,
verifiers, judge, algorithms, types, config). Must not import training, cluster or the command line.
"""

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, cast

from postgrad.errors import Missing, UnknownName, UserCode, did_you_mean
from postgrad.user_code import (
    add_current_folder,
    check_functions,
    import_named,
    is_path,
    load_object,
)

if TYPE_CHECKING:
    from postgrad.methods.method import Method

METHODS = {
    "sft": "postgrad.methods.sft:Sft",
    "grpo": "postgrad.methods.grpo:Grpo",
    "reward_model": "postgrad.methods.reward_model:RewardModel",
    "distill": "postgrad.methods.distill:Distill",
    "ppo": "postgrad.methods.ppo:Ppo",
    "dpo": "postgrad.methods.dpo:Dpo",
    "online_dpo": "postgrad.methods.online_dpo:OnlineDpo",
    "kto": "postgrad.methods.kto:Kto",
    "luffy": "postgrad.methods.luffy:Luffy",
    "exgrpo": "postgrad.methods.exgrpo:ExGrpo",
    "bupo": "postgrad.methods.bupo:Bupo",
    "classmate": "postgrad.methods.classmate:Classmate",
}


def find_method(name: str) -> "type[Method]":
    """Return the class of a built-in method, or of a user's own.

    Args:
        name: a key of METHODS, `package.module:Class` or `file.py:Class`.

    Raises:
        ConfigError: there is no such method, or its settings are not a dataclass.
    """
    add_current_folder()  # worker processes and verifiers import modules of the user from there
    if name in METHODS:
        return import_named(METHODS[name])
    if name.endswith(".py"):
        raise Missing(f"method={name} names a file without a class; write method={name}:CLASS")
    if not is_path(name):
        raise UnknownName(
            f"method={name} is unknown; {did_you_mean(name, METHODS)} "
            "(your own is given as package.module:Class or file.py:Class)"
        )
    found = load_object(name, f"method={name}", _is_method, "method class")
    _check_settings(found)
    _check_objective(found)
    check_functions(found)
    check_functions(found.Objective)
    return found


def _is_method(value: Any) -> bool:
    from postgrad.methods.method import Method

    return isinstance(value, type) and issubclass(value, Method)


def _check_settings(method: "type[Method]") -> None:
    """Raise ConfigError if a user's Settings is not a dataclass, so its fields would be lost."""
    settings = method.Settings
    label = f"{method.__name__}.Settings, the class {settings.__name__},"
    if not dataclasses.is_dataclass(settings):
        raise UserCode(f"{label} is not derived from the Settings of another method", at="method")
    own = [name for name in inspect.get_annotations(settings) if not name.startswith("_")]
    if own and "__dataclass_fields__" not in vars(settings):
        raise UserCode(
            f"{label} has no @dataclass, so {', '.join(own)} would be no setting; write @dataclass "
            "above the class",
            at="method",
        )


def _check_objective(method: "type[Method]") -> None:
    """Raise ConfigError for a loss outside the objective, or an objective of another method."""
    built_in = next(one for one in method.__mro__ if one.__module__.startswith("postgrad."))
    needed = cast("type[Method]", built_in).Objective
    if not issubclass(method.Objective, needed):
        raise UserCode(
            f"{method.__name__}.Objective: {method.Objective.__name__} is not derived from "
            f"{needed.__name__}, the objective of {built_in.__name__}",
            at="method",
        )
    if hasattr(method, "stages"):
        raise UserCode(
            f"{method.__name__}.stages: a step has two lists of stages; define sampling_stages() "
            "or learning_stages()",
            at="method",
        )
    for name in dir(needed):
        is_function = callable(getattr(needed, name)) and not name.startswith("_")
        if is_function and name != "check" and hasattr(method, name):
            raise UserCode(
                f"{method.__name__}.{name}: the loss and what belongs to it run in the model's "
                f"process; move {name} to a class derived from {needed.__name__}, and set "
                f"Objective in {method.__name__} to that class",
                at="method",
            )
