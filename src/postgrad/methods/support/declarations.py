"""Losses and advantages by name or by path, and the calls of their functions.

A user's own function names the columns it reads as arguments, and its options after `*`:

    def soft(logprobs, advantages, *, tau=1.0):
        return -advantages * torch.sigmoid(tau * logprobs)

method.loss=mine.py:soft selects it. What else a loss or an advantage needs is declared in its file,
in the words of algorithms.losses.Loss and algorithms.advantages.Advantage:

    soft_loss = Loss(soft, reads=("logprobs", "advantages"), options=("tau",))

Then both mine.py:soft and mine.py:soft_loss select the declaration.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from postgrad.algorithms.advantages import ADVANTAGES, Advantage
from postgrad.algorithms.losses import LOSSES, Loss, TokenLoss
from postgrad.algorithms.token_advantages import TokenAdvantages
from postgrad.errors import RunError, UnknownName, UserCode, did_you_mean
from postgrad.types import Batch
from postgrad.user_code import PythonObject, load_module

# Columns that a run has only with another setting, and that setting.
PROVIDED_BY = {
    "reference_logprobs": "set method.kl=loss (or method.kl=reward), which computes it",
    "values": "the recipe ppo computes it with its critic",
    "greedy_rewards": 'declare Advantage(..., needs=("greedy",)), which samples greedy responses',
}

Declaration = TypeVar("Declaration", Loss, Advantage)


def find_loss(name: str) -> Loss:
    """Return the loss of a name of LOSSES, of `file.py:NAME` or of `package.module:NAME`.

    Raises: ConfigError if there is none, or if its function cannot be called as declared.
    """
    return LOSSES[name] if name in LOSSES else _load(name, "method.loss", Loss)


def find_advantage(name: str) -> Advantage:
    """Return the advantage of a name of ADVANTAGES, of `file.py:NAME` or of `package.module:NAME`.

    Raises: ConfigError if there is none, or if its function cannot be called as declared.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return _load(name, "method.advantage", Advantage)


def _load(path: str, key: str, kind: type[Declaration]) -> Declaration:
    label = f"{key}={path}"
    if isinstance(path, PythonObject):
        declaration = _declare(path.value, kind, label)
    else:
        place, _, name = path.rpartition(":")
        module = load_module(place, label)
        value = vars(module).get(name)
        declaration = _declaration_of(module, value)
        if declaration is None and inspect.isfunction(value):
            declaration = _declare(value, kind, label)
        if not isinstance(declaration, kind):
            names = [key for key, one in vars(module).items() if isinstance(one, kind)]
            raise UnknownName(
                f"{label}: {place} has no {kind.__name__} {name}; {did_you_mean(name, names)}"
            )
    _check_call(declaration, label)
    return declaration


def _declare(value: Any, kind: type[Declaration], label: str) -> Declaration:
    """Return a Python object's declaration: itself, or for a function its arguments as `reads`.

    Arguments after `*` are options. A loss gets all rows, because nothing says that rows with
    zero advantages have no gradient. Raises ConfigError for anything else.
    """
    if isinstance(value, kind):
        return value
    if not inspect.isfunction(value):
        raise UserCode(
            f"{label}: a function or a {kind.__name__}(function, reads=(...)) is needed, "
            f"not {type(value).__name__}"
        )
    parameters = inspect.signature(value).parameters
    options = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    reads = tuple(name for name in parameters if name not in options)
    declared = kind(value, reads=reads, options=tuple(options))
    if not isinstance(declared, Loss):
        return declared
    required = tuple(
        name for name in options if parameters[name].default is inspect.Parameter.empty
    )
    return replace(declared, needs_all_rows=True, required=required)


def _declaration_of(module: ModuleType, value: Any) -> Loss | Advantage | None:
    """Return the declaration that a module's value is, or that has it as its function, or None."""
    if isinstance(value, Loss | Advantage):
        return value
    for one in vars(module).values():
        if isinstance(one, Loss | Advantage) and one.function is value:
            return one
    return None


def _check_call(declaration: Loss | Advantage, label: str) -> None:
    """Raise ConfigError if the function does not take what the declaration says."""
    arguments = dict.fromkeys([*declaration.reads, *declaration.options])
    try:
        signature = inspect.signature(declaration.function)
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserCode(
            f"{label}: the function cannot be called with its declared reads and options "
            f"({error}); name its arguments in reads=(...) and options=(...)"
        ) from error


def call_loss(
    loss: Loss, key: str, columns: Mapping[str, Any], options: Mapping[str, float]
) -> TokenLoss:
    """Call a loss with its columns and options. `key` starts error messages.

    Raises: RunError for an absent column or for a result that is not one number per token.
    """
    result = loss.function(**_select(columns, loss.reads, key), **options)
    if isinstance(result, Tensor):
        result = TokenLoss(result, {})
    if not isinstance(result, TokenLoss):
        raise RunError(
            f"{key} returned {type(result).__name__}; return one number per token as a tensor, or "
            "TokenLoss(values, metrics) of postgrad.algorithms.losses"
        )
    check_shape(result.values, columns["logprobs"].numel(), "token", key)
    return result


def expand_rows(batch: Batch, names: Sequence[str], key: str) -> dict[str, Tensor]:
    """(tokens,) the row columns of these names, each value repeated over its row's tokens.

    Names of other columns are left out. Raises: RunError for a column that has no numbers.
    """
    columns: dict[str, Tensor] = {}
    for name in names:
        if name in batch.tokens or name not in batch.rows:
            continue
        try:
            numbers = torch.as_tensor(batch.rows[name], device=batch.response.values.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"{key} reads the row column {name}, which does not have one number per row; set a "
                f'column of numbers in a stage, such as batch.rows["{name}_value"]'
            ) from error
        columns[name] = batch.expand(numbers)
    return columns


def call_advantage(
    advantage: Advantage,
    key: str,
    batch: Batch,
    columns: Mapping[str, Any],
    options: Mapping[str, Any],
) -> TokenAdvantages:
    """Advantages and returns per token. `key` starts error messages.

    An advantage per row is repeated over the row's trainable tokens; its returns are the same.

    Raises: RunError for an absent column, for values that the function refuses by ValueError, or
    for a result of another shape than declared.
    """
    arguments = _select(columns, advantage.reads, key)
    for name in advantage.reads_if_present:
        if columns.get(name) is not None:
            arguments[name] = columns[name]
    try:
        result = advantage.function(**arguments, **options)
    except ValueError as error:
        raise RunError(f"{key}: {error}") from error
    if advantage.level == "row":
        check_shape(result, len(batch), "row", key)
        values = batch.expand(result) * batch.tokens["loss_mask"]
        return TokenAdvantages(values, values)
    if not isinstance(result, TokenAdvantages):
        raise RunError(
            f"{key} returned {type(result).__name__}; return TokenAdvantages(advantages, returns), "
            'or declare level="row"'
        )
    check_shape(result.advantages, batch.num_tokens, "token", key)
    check_shape(result.returns, batch.num_tokens, "token", key)
    return result


def _select(columns: Mapping[str, Any], names: Sequence[str], key: str) -> dict[str, Any]:
    for name in names:
        if columns.get(name) is None:
            there = [known for known, column in columns.items() if column is not None]
            hint = PROVIDED_BY.get(name) or did_you_mean(name, there)
            raise RunError(f"{key} reads the column {name}, which this run does not have; {hint}")
    return {name: columns[name] for name in names}


def check_shape(values: Any, size: int, unit: str, key: str) -> None:
    """Raise RunError if the values are not one number per token or row. `key` starts it."""
    if not isinstance(values, Tensor) or values.shape != (size,):
        returned = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise RunError(
            f"{key} returned {returned}; it must return one number per {unit}: ({size},)"
        )
