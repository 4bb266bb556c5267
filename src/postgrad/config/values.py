"""Typed values of settings: the type of a setting decides how its text is read.

`data.train=a.jsonl,b.jsonl` and `agent=python a.py --n=3` need no quotes, because those settings
are texts. `${...}` is text, and nothing of the environment is read.
"""

import dataclasses
import functools
import re
import types
import typing
from typing import Any, Union, get_args, get_origin

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from postgrad.errors import UserCode, WrongValue

_CONSTANTS = {"null": None, "true": True, "false": False}
_WRONG_TYPES = {
    bool: "={value} is neither true nor false",
    int: "={value} is not a whole number",
    float: "={value} is not a number",
    str: "={value} is not a text; put it in quotes",
    list: " is a list; write {key}=[VALUE]",
    dict: " is a section, not a value; set one of its keys, e.g. {key}.NAME={value}",
}


# ---- YAML


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number, as in YAML 1.2, and `no`, `on` and dates are texts.

    A key that is given twice and an alias (`*name`) are refused.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "aliases (*name) are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in keys:
                raise ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            keys.add(str(key))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError or RecursionError."""
    return yaml.load(text, Loader=_Loader)


class _Dumper(yaml.SafeDumper):
    """YAML whose texts are texts for every version of YAML."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
    is_quoted = text.lower() in ("y", "n", "yes", "no", "on", "off", *_CONSTANTS)
    is_quoted = is_quoted or isinstance(_number(text), float)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if is_quoted else None)


_Dumper.add_representer(str, _represent_text)


def write_yaml(values: dict[str, Any], sort_keys: bool = False) -> str:
    """Return nested settings as YAML."""
    return yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=sort_keys
    )


# ---- types


@functools.cache
def kinds_of(schema: type) -> dict[str, Any]:
    """Return the type of each setting of a dataclass.

    Raises ConfigError for a field of a type that a setting cannot have.
    """
    hints = typing.get_type_hints(schema)
    kinds = {spec.name: hints[spec.name] for spec in dataclasses.fields(schema)}
    for name, kind in kinds.items():
        if not _is_possible(kind):
            raise UserCode(
                f"a field of {schema.__name__} cannot be a setting: {name}: {kind}; settings are "
                "bool, int, float, str, None, and lists and dicts of these",
                at=name,
            )
    return kinds


def _is_possible(kind: Any) -> bool:
    if kind in (bool, int, float, str, Any, type(None), list, dict):
        return True
    is_nested = get_origin(kind) in (list, dict, Union, types.UnionType)
    return dataclasses.is_dataclass(kind) or (is_nested and all(map(_is_possible, get_args(kind))))


def options_of(kind: Any) -> tuple[Any, ...]:
    """Return the types that a value may have."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def part_of(kind: Any, name: str) -> Any:
    """Return the type of `name` in a section or a dictionary; None if there is no such setting."""
    for one in options_of(kind):
        if dataclasses.is_dataclass(one):
            return kinds_of(one).get(name)  # type: ignore[arg-type]
        if (get_origin(one) or one) is dict:
            return (get_args(one) or (str, Any))[1]
        if one is Any:
            return Any
    return None


# ---- texts


def parse(text: str, kind: Any, key: str) -> Any:
    """Return the value that the text of `key=text` means for a setting of this type."""
    text = text.strip()
    kinds = [get_origin(one) or one for one in options_of(kind)]
    if text.lower() == "null":
        return None
    if list in kinds:
        return _list(text, kind, key)
    if dict in kinds or any(map(dataclasses.is_dataclass, kinds)):
        return _dict(text, kind, key)
    if str in kinds and len([one for one in kinds if one is not type(None)]) == 1:
        return _unquoted(text)
    if Any in kinds and text.startswith("["):
        return _list(text, list[Any], key)
    if Any in kinds and text.startswith("{"):
        return _dict(text, dict[str, Any], key)
    return _scalar(text)


def _scalar(text: str) -> Any:
    """Return a number, true, false or null, else the text without quotes."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    number = _number(text)
    if number is None:
        return _unquoted(text)
    return int(text) if re.fullmatch(r"[-+]?[0-9_]+", text) else number


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unquoted(text: str) -> str:
    """Return a text without the quotes around it; quotes that are part of it stay."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted and text[0] not in text[1:-1] else text


def _list(text: str, kind: Any, key: str) -> list[Any]:
    """Return the items of `[a,b]` or `a,b`."""
    text = _unquoted(text)
    is_list = text.startswith("[") and text.endswith("]")
    inner = text[1:-1] if is_list else text
    if is_list and any(mark in inner for mark in "\"'[]{}"):
        return _flow(text, list, key)
    [item] = [
        get_args(one) or (Any,) for one in options_of(kind) if (get_origin(one) or one) is list
    ]
    return [parse(part, item[0], key) for part in inner.split(",") if part.strip()]


def _dict(text: str, kind: Any, key: str) -> Any:
    """Return the entries of `{a: 1, b: 2}`; another text as it is, which no such setting has."""
    if not (text.startswith("{") and text.endswith("}")):
        return text
    inner = text[1:-1]
    if any(mark in inner for mark in "\"'[]{}"):
        return _flow(text, dict, key)
    entries = [part.partition(":") for part in inner.split(",") if part.strip()]
    return {
        name.strip(): parse(value, part_of(kind, name.strip()) or Any, key)
        for name, _, value in entries
    }


def _flow(text: str, kind: type, key: str) -> Any:
    """Return a list or dict with quotes or brackets inside, which is read as YAML."""
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise WrongValue(
            f"{key}={text} cannot be read; put the value into quotes: '{key}=[\"...\"]'"
        )
    return value


# ---- values


def convert(value: Any, kind: Any, key: str) -> Any:
    """Return the value in the type of its setting: 3 as 3.0 or "3", never 3.5 as 3.

    Raises ConfigError.
    """
    options = options_of(kind)
    first = next(one for one in options if one is not type(None))
    plain = get_origin(first) or first
    if value is None and (type(None) in options or Any in options):
        return None
    if value is None and plain is list:
        return []
    if value is None:
        raise WrongValue(f"{key}=null: it needs a value")
    read = value
    if isinstance(value, str) and not {str, Any} & set(options):
        read = parse(value, kind, key)
        if read is None:
            return convert(None, kind, key)
    for one in options:
        found = _convert(read, one, key)
        if found is not None:
            return found
    text = str(value).lower() if isinstance(value, bool) else value
    hint = ""
    if isinstance(value, str) and "," in value and plain in (int, float, bool):
        hint = "; one value is needed, start one run per value"
    raise WrongValue(f"{key}{_WRONG_TYPES[plain].format(value=text, key=key)}{hint}")


def _convert(value: Any, kind: Any, key: str) -> Any:
    """Return the value as this type; None if it has another."""
    plain = get_origin(kind) or kind
    if kind is Any:
        return value
    if plain is list and isinstance(value, list | tuple):
        [item] = get_args(kind) or (Any,)
        return [convert(one, item, key) for one in value]
    if plain is dict and isinstance(value, dict):
        item = (get_args(kind) or (str, Any))[1]
        return {str(name): convert(one, item, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, bool):
        return value if kind is bool else None
    if kind is int and isinstance(value, int):
        return value
    if kind is float and isinstance(value, int | float):
        return float(value)
    if kind is str and isinstance(value, str):
        return value  # also a PythonObject
    if kind is str and isinstance(value, int | float):
        return str(value)
    return None
