"""Methods: how one algorithm fills the stages of a step. One file each; base.py has the stages they share.

What several of them start from: grpo.py (a group, advantages, a policy loss), mixed.py (rows with tokens of others), thinking.py (thoughts
before answers).

METHODS maps names to classes by dotted path; a user gives the same kind of path. Nothing registers itself at import.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from postgrad.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from postgrad.methods.base import Method

METHODS = {
    "sft": "postgrad.methods.sft:Sft",
    "grpo": "postgrad.methods.grpo:Grpo",
    "ppo": "postgrad.methods.ppo:Ppo",
    "dpo": "postgrad.methods.dpo:Dpo",
    "luffy": "postgrad.methods.luffy:Luffy",
    "exgrpo": "postgrad.methods.exgrpo:ExGrpo",
    "bupo": "postgrad.methods.bupo:Bupo",
    "classmate": "postgrad.methods.classmate:Classmate",
}


def find_method(name: str) -> "type[Method]":
    """The class of a built-in method's name, or of `package.module:Class` (the current folder counts, as with python -m)."""
    path = METHODS.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"method={name} is unknown; {did_you_mean(name, METHODS)} Your own: method=package.module:Class"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"method={name}: no module {error.name}; run from the folder that holds it, or install it"
        ) from error
    from postgrad.methods.base import Method

    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        classes = [
            k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Method)
        ]
        raise ConfigError(
            f"method={name}: {module_name} has no method class {class_name}; {did_you_mean(class_name, classes)}"
        )
    return found
