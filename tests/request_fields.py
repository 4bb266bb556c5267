"""Wrong values for the fields of a request, made from its pydantic model."""

from collections.abc import Iterator
from typing import Any

VALUES = {
    "boolean": True,
    "integer": 3,
    "number": 0.5,
    "string": "x",
    "array": [{"a": 3.5}],
    "object": {"a": [3]},
}
ALSO_TEXT = ("prompt", "stop", "input")  # a list or a single text


def wrong_fields(model: Any, skipped: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) that the model refuses: other types, and out of the field's bounds."""
    schema = model.model_json_schema()
    kinds = {f"#/$defs/{name}": kind for name, kind in schema.get("$defs", {}).items()}
    for name, field in schema["properties"].items():
        if name not in skipped:
            yield from ((name, value) for value in _wrong_values(name, field, kinds))


def _wrong_values(name: str, field: dict[str, Any], kinds: dict[str, Any]) -> Iterator[Any]:
    options = [kinds.get(one.get("$ref"), one) for one in field.get("anyOf", [field])]
    types = {one.get("type") for one in options} | ({"string"} if name in ALSO_TEXT else set())
    if types & {"number"}:
        types.add("integer")
    yield from (value for kind, value in VALUES.items() if kind not in types)
    for option in options:
        if "minimum" in option:
            yield option["minimum"] - 1
        if "exclusiveMinimum" in option:
            yield option["exclusiveMinimum"]
        if "maximum" in option:
            yield from (option["maximum"] + 1, 10**400)
        if "maxItems" in option:
            yield [1] * (option["maxItems"] + 1)
        if "minItems" in option:
            yield []
        if "enum" in option:
            yield "another"
