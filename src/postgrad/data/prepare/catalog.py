"""The data sets of sets.yaml, by name."""

from pathlib import Path
from typing import Any

import yaml

from postgrad.data.prepare import converters, splits
from postgrad.data.prepare.base import DataSet, Option
from postgrad.errors import UnknownName, did_you_mean


def _read_set(fields: dict[str, Any]) -> DataSet:
    """Return the data set of an entry: texts become tuples of words, names become functions."""
    fields = {
        **fields,
        "splits": {name: tuple(text.split()) for name, text in fields["splits"].items()},
        "convert": getattr(converters, fields["convert"]),
        "options": _read_options(fields.get("options", {})),
    }
    for name in ("local", "pair_by"):
        fields[name] = tuple(fields.get(name, "").split())
    if "select_split" in fields:
        fields["select_split"] = getattr(splits, fields["select_split"])
    return DataSet(**fields)


def _read_options(options: dict[str, list[Any]]) -> dict[str, Option]:
    return {
        name: Option(default, text, tuple(choices))
        for name, (default, text, *choices) in options.items()
    }


ENTRIES = yaml.safe_load(Path(__file__).with_name("sets.yaml").read_text(encoding="utf-8"))
SETS: dict[str, DataSet] = {name: _read_set(fields) for name, fields in ENTRIES.items()}
# Options of every data set.
COMMON: dict[str, Option] = {
    "split": Option("", "which split; default: the first of the table"),
    "style": Option("", "prompt style; default: the data set's own"),
    "source": Option("", "keep only the rows of one data_source, for files that hold several"),
    "n": Option(0, "keep only the first n problems; 0: all"),
    "duplicates": Option("drop", "problems that repeat another one", ("drop", "keep")),
    "data_source": Option("", "write this data_source, which selects the verifier"),
}


def find_set(name: str) -> DataSet:
    """Return the data set of this name; `hh-rlhf` and `hh_rlhf` are the same."""
    by_name = {known.replace("-", "_"): known for known in SETS}
    known = by_name.get(name.lower().replace("-", "_"))
    if known is None:
        raise UnknownName(f"no data set {name}; {did_you_mean(name, SETS)}", at="NAME")
    return SETS[known]
