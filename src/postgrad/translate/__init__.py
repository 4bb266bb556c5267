"""What scripts of verl, its forks and TRL mean here; `postgrad import` prints it.

Owns the names, values and defaults of those projects (verl.yaml, trl.yaml). Nothing of a script is
executed. Imports no torch; the command line imports it, and nothing else does.
"""

from postgrad.translate.defaults import defaults_of
from postgrad.translate.result import SET_IT, Translation, has_argument, has_variable
from postgrad.translate.scripts import read_settings, translate

__all__ = [
    "SET_IT",
    "Translation",
    "defaults_of",
    "has_argument",
    "has_variable",
    "read_settings",
    "translate",
]
