"""Checks of a user's own method class, from the source code of its functions.

They refuse what would be without effect: attributes that a stage sets for the loss, which runs in
another object, and inherited settings that an override no longer reads. Where the code does not
show it, for example because a helper gets `self`, nothing is refused.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from postgrad.errors import ConfigError
from postgrad.methods.support.checks import refuse_unread

# Functions that run beside the model. The driver calls some of them too.
BESIDE_MODEL = (
    *("view", "prepare", "needs_all_rows", "row_groups", "target_ids", "lr_scales"),
    *("loss", "token_losses", "kl_losses", "loss_options", "check_model"),
)
TOKEN_LOSS_SETTINGS = ("loss", "loss_options", "clip_low", "clip_high", "dual_clip")
LOSS_SETTINGS = (
    *TOKEN_LOSS_SETTINGS,
    "entropy_coef",
    "sequence_mask",
    "kl_ratio",
    "top_entropy",
)
SCORE_SETTINGS = ("mask_truncated", "overlong_buffer")
ADVANTAGE_SETTINGS = (
    *("advantage", "normalize_by_std", "gamma", "lam", "turn_weight", "reward_weights"),
)
# An override, what it may call so that the settings are still read, and the settings.
OVERRIDES = {
    "loss": (("super().loss", "token_losses", "policy_loss"), LOSS_SETTINGS),
    "token_losses": (("super().token_losses", "policy_loss"), TOKEN_LOSS_SETTINGS),
    "score": (("super().score",), SCORE_SETTINGS),
    "estimate": (("super().estimate", "advantage", "advantage_columns"), ADVANTAGE_SETTINGS),
}


@dataclass
class Usage:
    """What functions do with `self`.

    `loads` and `stores` are dotted paths after `self.`; a path in `stores` was assigned to, also
    by an index. `names` are all attributes and texts in the code, `super().NAME` for calls of the
    base class. `passes_self` is whether a call gets `self` or its settings.
    """

    loads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    passes_self: bool = False


def user_functions(cls: type) -> dict[str, list[ast.FunctionDef]]:
    """The functions that classes outside Postgrad define, by name; {} if one has no source."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in ("postgrad", "builtins"):
            continue
        for name, value in vars(owner).items():
            if not isinstance(value, FunctionType):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
            except (OSError, TypeError, SyntaxError):
                return {}
            found.setdefault(name, []).extend(
                node for node in tree.body if isinstance(node, ast.FunctionDef)
            )
    return found


def usage_of(functions: Iterable[ast.FunctionDef]) -> Usage:
    usage = Usage()
    for function in functions:
        arguments = function.args.posonlyargs + function.args.args
        own_name = arguments[0].arg if arguments else ""
        for node in ast.walk(function):
            _add(usage, node, own_name)
    return usage


def _add(usage: Usage, node: ast.AST, own_name: str) -> None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        usage.names.add(node.value)
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        passed = {_path(one, own_name) for one in given}
        names = {one.id for one in given if isinstance(one, ast.Name)}
        usage.passes_self |= bool(passed & {"", "settings", "config", "config.method"})
        usage.passes_self |= "settings" in names
    if isinstance(node, ast.Attribute):
        of_base = isinstance(node.value, ast.Call) and _is_super(node.value)
        usage.names.add(f"super().{node.attr}" if of_base else node.attr)
    if isinstance(node, ast.Attribute | ast.Subscript):
        is_indexed = isinstance(node, ast.Subscript)
        path = _path(node.value if is_indexed else node, own_name)
        if path and isinstance(node.ctx, ast.Store):
            usage.stores.add(path)
        elif path:
            usage.loads.add(path)


def _is_super(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "super"


def _path(node: ast.AST, own_name: str) -> str | None:
    """The dotted path after `self.`, empty for `self` alone; None for anything else."""
    if isinstance(node, ast.Name):
        return "" if node.id == own_name else None
    if not isinstance(node, ast.Attribute):
        return None
    path = _path(node.value, own_name)
    return None if path is None else f"{path}.{node.attr}".removeprefix(".")


def check_attributes(method: Any) -> None:
    """Refuses an attribute or a setting that a stage sets and the loss reads.

    The loss runs in an object of its own, in a worker also in another process.
    """
    functions = user_functions(type(method))
    beside = _reachable(functions, BESIDE_MODEL)
    usage = usage_of(node for name in beside for node in functions[name])
    read = usage.loads | {f"settings.{name}" for name in (*LOSS_SETTINGS, "kl_coef")}
    for name in functions:
        if name in beside or name == "__init__":
            continue
        for path in sorted(usage_of(functions[name]).stores & read - usage.stores):
            raise ConfigError(
                f"method={method.config.method.name}: {name} sets self.{path}, which the loss "
                "reads; the loss runs in another object that does not see it: set a column, such "
                f'as batch.rows["{path.rpartition(".")[2]}"], and read that'
            )


def _reachable(functions: dict[str, list[ast.FunctionDef]], starts: Iterable[str]) -> set[str]:
    """The names of the functions that `starts` call, and of the starts themselves."""
    found: set[str] = set()
    waiting = [name for name in starts if name in functions]
    while waiting:
        name = waiting.pop()
        found.add(name)
        loads = usage_of(functions[name]).loads
        waiting += [other for other in loads if other in functions and other not in found]
    return found


def replaces(method: Any, override: str) -> bool:
    """Whether a user's function of OVERRIDES does without the built-in one, as its code shows."""
    functions = user_functions(type(method))
    usage = usage_of(node for nodes in functions.values() for node in nodes)
    readers, _ = OVERRIDES[override]
    has_reader = usage.passes_self or bool(usage.names.intersection(readers))
    return override in functions and not has_reader


def may_read(method: Any, override: str, name: str) -> bool:
    """Whether a user's class has its own function of this name and may read the setting."""
    functions = user_functions(type(method))
    usage = usage_of(node for nodes in functions.values() for node in nodes)
    return override in functions and (usage.passes_self or name in usage.names)


def check_overrides(method: Any) -> None:
    """Refuses inherited settings of GRPO's family that a user's override no longer reads."""
    functions = user_functions(type(method))
    usage = usage_of(node for nodes in functions.values() for node in nodes)
    for override, (_, names) in OVERRIDES.items():
        if not replaces(method, override):
            continue
        unread = [name for name in names if name not in usage.names]
        if {"greedy", "sum_probs_squared"}.intersection(method.advantage.needs):
            unread = [name for name in unread if name != "advantage"]  # it adds a stage
        place = f"{type(method).__name__}.{override}"
        reason = f"with {place}, which does not read it"
        fix = f"read self.settings in {place}, or call super().{override}"
        refuse_unread("method", method.settings, unread, reason, fix)
