"""Values of expressions of a Python script that is read and not executed."""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass
class TrlConfig:
    """A call of a config of TRL. Arguments have their values as expressions."""

    kind: str
    arguments: dict[str, ast.expr]
    notes: list[str]


@dataclass
class ValueReader:
    """Follows names to what was assigned to them.

    Attributes:
        names: the value of each name of the scope that is read; dicts are always an ast.Dict.
        attributes: the same for `self.NAME`, in all scopes.
        lookups: names that were looked up, until a subclass takes them.
    """

    names: dict[str, ast.expr | TrlConfig] = field(default_factory=dict)
    attributes: dict[str, ast.expr | TrlConfig] = field(default_factory=dict)
    lookups: set[str] = field(default_factory=set)

    def value_of(self, node: ast.expr) -> ast.expr | TrlConfig | None:
        """The value of a name, or the expression itself."""
        if isinstance(node, ast.Name):
            self.lookups.add(node.id)
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if isinstance(owner, TrlConfig):
                return owner.arguments.get(node.attr)
            name = ast.unparse(node)
            self.lookups.add(name)
            return self.attributes.get(name)
        return node

    def items_of(self, node: ast.expr, unread: list[str]) -> dict[str, ast.expr] | None:
        """The entries of a dict: a literal, dict(...), a.copy(), a | b or a name of one of them.

        None for anything else. Parts that cannot be read are added to `unread`.
        """
        value = self.value_of(node)
        if isinstance(value, ast.Dict):
            pairs = list(zip(value.keys, value.values, strict=True))
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
            pairs = [(None, one) for one in value.args]
            pairs += [(word.arg and ast.Constant(word.arg), word.value) for word in value.keywords]
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            is_copy = value.func.attr == "copy" and not value.args
            return self.items_of(value.func.value, unread) if is_copy else None
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
            pairs = [(None, value.left), (None, value.right)]
        else:
            return None
        found: dict[str, ast.expr] = {}
        for key, one in pairs:
            name = self.resolve(key) if isinstance(key, ast.expr) else None
            if isinstance(name, ast.Constant):
                found[str(name.value)] = self.resolve(one)
                continue
            items = self.items_of(one, unread) if name is None else None
            if isinstance(one, ast.Constant) and name is None:
                unread.append(str(one.value))  # see dict_of
            elif items is None:
                unread.append(f"**{ast.unparse(one)}" if name is None else ast.unparse(name))
            else:
                found |= items
        return found

    def resolve(self, node: ast.expr) -> ast.expr:
        """The expression with names of literals, arithmetic and f-strings filled in."""
        if isinstance(node, ast.Name | ast.Attribute):
            value = self.value_of(node)
            if isinstance(value, ast.Dict):
                value = ast.Dict([*value.keys], [*value.values])  # it may change later
            return value if isinstance(value, ast.expr) and is_literal(value) else node
        if isinstance(node, ast.List | ast.Tuple):
            return type(node)([self.resolve(one) for one in node.elts], ast.Load())
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return ast.UnaryOp(node.op, self.resolve(node.operand))
        if isinstance(node, ast.Subscript):
            items = self.items_of(node.value, []) or {}
            key = self.resolve(node.slice)
            return items.get(text_of(key), node) if isinstance(key, ast.Constant) else node
        if isinstance(node, ast.BinOp):
            return _calculate(node, self.resolve(node.left), self.resolve(node.right))
        if isinstance(node, ast.JoinedStr):
            return self._join(node)
        return node

    def _join(self, node: ast.JoinedStr) -> ast.expr:
        """The text of an f-string, if all its parts are literals without a format."""
        parts: list[str] = []
        for one in node.values:
            if isinstance(one, ast.FormattedValue) and not one.format_spec and one.conversion < 0:
                one = self.resolve(one.value)
            if not isinstance(one, ast.Constant):
                return node
            parts.append(str(one.value))
        return ast.Constant("".join(parts))


def dict_of(items: dict[str, ast.expr], unread: Sequence[str]) -> ast.Dict:
    """A dict literal; what could not be read of it are texts without a key."""
    keys: list[ast.expr | None] = [*map(ast.Constant, items), *[None for _ in unread]]
    return ast.Dict(keys, [*items.values(), *map(ast.Constant, unread)])


def is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(is_literal(one) for one in node.elts)
    if isinstance(node, ast.Dict):
        return None not in node.keys and all(is_literal(one) for one in node.values)
    if isinstance(node, ast.UnaryOp):
        return is_literal(node.operand)
    return isinstance(node, ast.Constant)


def _calculate(node: ast.BinOp, left: ast.expr, right: ast.expr) -> ast.expr:
    """The number that the operation gives; the operation itself if it is not known."""
    calculate = _OPERATORS.get(type(node.op))
    if not isinstance(left, ast.Constant) or not isinstance(right, ast.Constant):
        return node
    numbers = [left.value, right.value]
    is_text = all(isinstance(number, str) for number in numbers)
    if is_text and isinstance(node.op, ast.Add):
        return ast.Constant(f"{left.value}{right.value}")
    if calculate is None or not all(isinstance(number, int | float) for number in numbers):
        return node
    try:
        return ast.Constant(calculate(*numbers))  # type: ignore[arg-type]
    except (ZeroDivisionError, OverflowError):
        return node


def text_of(node: ast.expr) -> str:
    """The expression as text; that of a string without quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)
