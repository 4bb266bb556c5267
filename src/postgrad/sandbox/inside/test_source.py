"""What the source of a test says about the names that it uses.

The test runner needs to know three things before a test runs: which classes of the program the test
uses as classes, whether it reads attributes of the program's objects, and where it zips a result of
the program with expected values.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from .handles import PLAIN_ATTRIBUTES

CHECKED_ZIP = "__checked_zip__"


class TestSource:
    """The parsed source of a test.

    Args:
        tree: setup and test.
        program_names: the names in it that are bound to values of the program.
    """

    __test__ = False

    def __init__(self, tree: ast.Module, program_names: Iterable[str]) -> None:
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.from_program = self._derived(set(program_names))

    def uses_as_class(self, name: str) -> bool:
        """Return whether the test treats what `name(...)` returns as an object with an interface.

        It does if it reads an attribute that no built-in type has, or asks isinstance(x, name).
        """
        instances = self._derived({name})
        return any(
            _reads_own_attribute(node, instances) or _is_type_check(node, name)
            for node in self.nodes
        )

    def reads_structure(self) -> bool:
        """Return whether the test reads attributes of the program's objects, as of a structure."""
        return any(_reads_own_attribute(node, self.from_program) for node in self.nodes)

    def base_names(self) -> set[str]:
        """Return the names that the test's classes derive from."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        return {name for node in classes for base in node.bases for name in _names(base)}

    def check_zips(self) -> None:
        """Replace zip() of a program's result and other values by CHECKED_ZIP.

        Its first argument says which of the others come from the program.
        """
        for node in self.nodes:
            if not isinstance(node, ast.Call) or not _is_call_of(node, "zip") or node.keywords:
                continue
            if any(isinstance(argument, ast.Starred) for argument in node.args):
                continue
            flags = [_mentions(argument, self.from_program) for argument in node.args]
            if any(flags) and not all(flags):
                node.func = ast.Name(CHECKED_ZIP, ast.Load())
                constants: list[ast.expr] = [ast.Constant(flag) for flag in flags]
                node.args.insert(0, ast.Tuple(constants, ast.Load()))
        ast.fix_missing_locations(self.tree)

    def _derived(self, names: set[str]) -> set[str]:
        """Return these names, and the variables and parameters whose values are made with them."""
        functions = {
            node.name: node.args.posonlyargs + node.args.args
            for node in self.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        derived = set(names)
        while True:
            before = len(derived)
            for node in self.nodes:
                for value, targets in _assignments(node):
                    if _mentions(value, derived):
                        derived.update(targets)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    parameters = functions.get(node.func.id, [])
                    for parameter, argument in zip(parameters, node.args, strict=False):
                        if _mentions(argument, derived):
                            derived.add(parameter.arg)
            if len(derived) == before:
                return derived


def checked_zip(from_program: tuple[bool, ...], *iterables: Any) -> Iterator[Any]:
    """zip() that raises AssertionError if a program's result ends before the expected values do.

    Args:
        from_program: per iterable, whether it comes from the program. The other ones count as
            expected values if they are lists or tuples.
    """
    iterators = [iter(iterable) for iterable in iterables]
    num_expected = [
        len(iterable)
        for iterable, flag in zip(iterables, from_program, strict=True)
        if not flag and isinstance(iterable, (list, tuple))
    ]

    def rows() -> Iterator[Any]:
        num_rows = 0
        while True:
            row = []
            for iterator, flag in zip(iterators, from_program, strict=True):
                try:
                    row.append(next(iterator))
                except StopIteration:
                    if flag and any(number > num_rows for number in num_expected):
                        raise AssertionError(
                            f"the result has {num_rows} items, fewer than expected"
                        ) from None
                    return
            yield tuple(row)
            num_rows += 1

    return rows()


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return not names.isdisjoint(_names(node))


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_type_check(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call) or not _is_call_of(node, "isinstance"):
        return False
    return len(node.args) == 2 and name in _names(node.args[1])


def _reads_own_attribute(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node reads an attribute that no built-in type has from one of `names`."""
    if not isinstance(node, ast.Attribute) or node.attr in PLAIN_ATTRIBUTES:
        return False
    return _mentions(node.value, names)


def _target_assignments(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield (value, names) of an assignment; a, b = x, y gives x to a and y to b."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        has_star = any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
        if len(target.elts) == len(value.elts) and not has_star:
            for one_target, one_value in zip(target.elts, value.elts, strict=True):
                yield one_value, _names(one_target)
            return
    yield value, _names(target)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield (value, names of the variables) of a node that gives a value to variables."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _target_assignments(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
        yield node.value, _names(node.target)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.iter, _names(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.context_expr, _names(node.optional_vars)
