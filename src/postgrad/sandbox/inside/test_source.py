"""What the source of a test says about exceptions and loops."""

import ast
from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CHECKED_LOOP = "__checked_loop__"
# They end loops and generators that do not mean them.
ENDS = {"GeneratorExit", "StopIteration", "StopAsyncIteration"}


def demanded_exceptions(tree: ast.Module) -> set[str]:
    """Return the exceptions without which the test fails.

    They are arguments of assertRaises and assertRaisesRegex, and what an except clause catches if
    the block before it ends with a statement that fails: assert False, raise, self.fail().
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called_name(node).startswith("assertRaises"):
            for argument in node.args[:1]:
                names |= _names(argument)
        elif isinstance(node, ast.Try) and _fails((node.orelse or node.body)[-1]):
            for handler in node.handlers:
                names |= _names(handler.type)
    return names - ENDS - {"BaseException"}


def has_other_handlers(tree: ast.Module) -> bool:
    """Return whether the test catches an exception that it does not demand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.handlers:
            catches_all = any(handler.type is None for handler in node.handlers)
            if catches_all or not _fails((node.orelse or node.body)[-1]):
                return True
    return False


def _names(node: ast.AST | None) -> set[str]:
    children = ast.walk(node) if node else ()
    return {child.id for child in children if isinstance(child, ast.Name)}


def _fails(node: ast.stmt) -> bool:
    """Return whether a statement always raises."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _called_name(node.value) == "fail"
    return isinstance(node, ast.Raise)


def _called_name(call: ast.Call) -> str:
    """Return the last name of the function that is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def check_loops(tree: ast.Module) -> None:
    """Pass what a for statement iterates over through CHECKED_LOOP, if its body decides the test.

    It does if it asserts, raises, returns or assigns True or False, or calls such a function.
    """
    deciding: set[str] = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    for _ in functions:
        deciding |= {node.name for node in functions if _asserts(node.body, deciding)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and _decides(node.body, deciding):
            node.iter = ast.Call(ast.Name(CHECKED_LOOP, ast.Load()), [node.iter], [])
    ast.fix_missing_locations(tree)


def _decides(body: list[ast.stmt], deciding: set[str]) -> bool:
    for node in _children(body):
        if isinstance(node, (ast.Return, ast.Assign)):
            value = node.value
            if isinstance(value, ast.BoolOp):
                return True
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                return True
    return _asserts(body, deciding)


def _asserts(body: list[ast.stmt], deciding: set[str]) -> bool:
    for node in _children(body):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call):
            name = _called_name(node)
            if name.startswith("assert") or name == "fail" or name in deciding:
                return True
    return False


def _children(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)
