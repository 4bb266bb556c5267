"""From the text of `reward.verifier` to a verifier: a built-in name, a path, or a weighted sum."""

import re
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path

from postgrad.errors import ConfigError, did_you_mean
from postgrad.user_code import refuse_object_name
from postgrad.verifiers.combine import Term, check_arguments, parse_sum, score_sum
from postgrad.verifiers.loading import load_verifier_function, required_arguments
from postgrad.verifiers.port import Verifier
from postgrad.verifiers.table import VERIFIERS, VerifierSpec

SUM_PREFIX = "sum of "  # VerifierSpec.path of a weighted sum: this, then the text of the setting


def find_verifier(name: str, arguments: Collection[str] = ()) -> VerifierSpec:
    """Return where the verifier of this name is; `arguments` are the names that it is given.

    A user's verifier is loaded once, so that a mistake shows before the run starts. A sum runs
    inline only if all its terms do, and has the time limits of its terms together.

    Raises:
        ConfigError: there is no such verifier, module, file or function, an argument without a
            default is not given, or a sum is malformed.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    refuse_object_name(name, f"reward.verifier={name}")
    if is_sum(name):
        return _find_sum(name)
    module_path, colon, function = name.rpartition(":")
    if name.endswith(".py"):
        raise ConfigError(
            f"reward.verifier={name} names a file without a function; "
            f"write reward.verifier={name}:FUNCTION"
        )
    if not colon or not module_path or not function:
        raise ConfigError(
            f"reward.verifier={name} is not a verifier; {did_you_mean(name, VERIFIERS)} "
            "(your own is given as package.module:function or file.py:function)"
        )
    if module_path.endswith(".py"):
        module_path = str(Path(module_path).expanduser().resolve())
    spec = VerifierSpec(f"{module_path}:{function}", is_own=True)
    for needed in required_arguments(load_verifier(spec.path)):
        if needed not in arguments:
            raise ConfigError(
                f"reward.verifier={name}: {function} also needs {needed}; give it a number, as in "
                f"{name}({needed}=1), or a default in the file"
            )
    return spec


def _find_sum(text: str) -> VerifierSpec:
    specs: list[VerifierSpec] = []
    for term in parse_sum(text):
        if not term.name:
            continue
        spec = find_verifier(term.name, term.arguments)
        if term.arguments:
            check_arguments(term, load_verifier(spec.path))
        specs.append(spec)
    return VerifierSpec(
        SUM_PREFIX + text,
        inline=all(spec.inline for spec in specs),
        time_limit_s=sum(spec.time_limit_s for spec in specs),
        is_own=any(spec.is_own for spec in specs),
    )


def is_sum(name: str) -> bool:
    """Return whether `name` is a sum: it has a weight, a sign, arguments or a part."""
    if re.search(r"\*|\s[+-]\s|\(|^\s*-", name):
        return True
    if "." not in name:
        return False
    function = name.rpartition(":")[2]
    return name.partition(".")[0] in VERIFIERS or (":" in name and "." in function)


@cache
def load_verifier(path: str) -> Verifier:
    """Return the verifier at a VerifierSpec's path.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if not path.startswith(SUM_PREFIX):
        return load_verifier_function(path)
    terms = parse_sum(path.removeprefix(SUM_PREFIX))
    return partial(score_sum, [(term, _load_term(term)) for term in terms])


def _load_term(term: Term) -> Verifier | None:
    """Return the verifier of a term with its arguments bound; None for a constant."""
    if not term.name:
        return None
    function = load_verifier(find_verifier(term.name, term.arguments).path)
    return partial(function, **term.arguments) if term.arguments else function
