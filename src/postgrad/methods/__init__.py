"""Training methods: one file per algorithm. base.py has the stages that all methods share.

    sft, dpo, online_dpo, kto, reward_model    learn from given responses or from preferences
    ppo, grpo, luffy, exgrpo, bupo, classmate  learn from rewards
    curriculum                                 grpo that draws problems by their difficulty
    distill, self_distill                      learn from a teacher's log-probs
    support/                                   code that several methods share

METHODS maps each name to a class. A user's own method is given as `package.module:Class` or
`file.py:Class`. Nothing registers itself at import.

May import: everything below `methods` in the layers of pyproject.toml (rollout, model, data,
verifiers, judge, algorithms, types, config). Must not import training, cluster or the command line.
"""

import dataclasses
import inspect
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from postgrad.errors import ConfigError, did_you_mean
from postgrad.user_code import add_current_folder, import_named, is_path, load_object

if TYPE_CHECKING:
    from postgrad.methods.base import Method

METHODS = {
    "sft": "postgrad.methods.sft:Sft",
    "grpo": "postgrad.methods.grpo:Grpo",
    "curriculum": "postgrad.methods.curriculum:Curriculum",
    "reward_model": "postgrad.methods.reward_model:RewardModel",
    "distill": "postgrad.methods.distill:Distill",
    "self_distill": "postgrad.methods.self_distill:SelfDistill",
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
    """The class of a built-in method, or of a user's own.

    Args:
        name: a key of METHODS, `package.module:Class` or `file.py:Class`.

    Raises:
        ConfigError: there is no such method, or its settings are not a dataclass.
    """
    add_current_folder()  # worker processes and verifiers import modules of the user from there
    if name in METHODS:
        return import_named(METHODS[name])
    if name.endswith(".py"):
        raise ConfigError(f"method={name} names a file without a class; write method={name}:CLASS")
    if not is_path(name):
        raise ConfigError(
            f"method={name} is unknown; {did_you_mean(name, METHODS)} "
            "(your own is given as package.module:Class or file.py:Class)"
        )
    found = load_object(name, f"method={name}", _is_method, "method class")
    _check_settings(found)
    check_functions(found)
    return found


def _is_method(value: Any) -> bool:
    from postgrad.methods.base import Method

    return isinstance(value, type) and issubclass(value, Method)


def _check_settings(method: "type[Method]") -> None:
    """Raises ConfigError if a user's Settings is not a dataclass, so its fields would be lost."""
    settings = method.Settings
    label = f"{method.__name__}.Settings, the class {settings.__name__},"
    if not dataclasses.is_dataclass(settings):
        raise ConfigError(f"{label} is not derived from the Settings of another method")
    own = [name for name in inspect.get_annotations(settings) if not name.startswith("_")]
    if own and "__dataclass_fields__" not in vars(settings):
        raise ConfigError(
            f"{label} has no @dataclass, so {', '.join(own)} would be no setting; write @dataclass "
            "above the class"
        )


def check_functions(cls: type) -> None:
    """Refuse a user's class with a function that cannot do what its name says.

    Raises:
        ConfigError: an `__init__` that does not call the one of the base class, or a misspelled
            name: a function that nothing calls, named almost as one of the base class.
    """
    own: dict[str, FunctionType] = {}
    inherited: set[str] = set()
    for owner in cls.__mro__:
        functions = {
            name: one for name, one in vars(owner).items() if isinstance(one, FunctionType)
        }
        if owner.__module__.partition(".")[0] == "postgrad":
            inherited |= functions.keys()
        else:
            own |= functions
    names = {name for function in own.values() for name in _names(function.__code__)}
    if "__init__" in own and "__init__" not in _names(own["__init__"].__code__):
        raise ConfigError(
            f"{cls.__name__}.__init__ does not call super().__init__(config); begin it with that, "
            "and give it the arguments self and config"
        )
    for name in own.keys() - inherited - names:
        similar = [] if name.startswith("_") else get_close_matches(name, inherited, 1, 0.8)
        if similar:
            raise ConfigError(
                f"{cls.__name__}.{name}: nothing calls a function of this name; did you mean "
                f"{similar[0]}?"
            )


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function's code names, with inner functions."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
