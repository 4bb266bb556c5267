"""Fresh copies of the modules under test, one of them with one expression of one function replaced.

The replacement happens in the syntax tree, so that formatting and comments do not matter.
"""

import ast
import importlib
import importlib.machinery
import pkgutil
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import postgrad.algorithms

PACKAGE = "postgrad.algorithms"
# Short name -> full name of every module that has a mutation.
MODULES = {
    info.name: f"{PACKAGE}.{info.name}"
    for info in pkgutil.iter_modules(postgrad.algorithms.__path__)
}
MODULES |= {
    "replay_pool": "postgrad.methods.support.replay_pool",
    "thought_spans": "postgrad.data.thought_spans",
}


class Mutation(NamedTuple):
    """`old` becomes `new` in `module`.`function`; the check named `check` must notice."""

    module: str
    function: str
    old: str
    new: str
    check: str


def real_modules() -> SimpleNamespace:
    """The modules under test by their short names, unchanged."""
    return SimpleNamespace(
        **{name: importlib.import_module(path) for name, path in MODULES.items()}
    )


def mutated_modules(module: str, function: str, old: str, new: str) -> SimpleNamespace:
    """Fresh copies of all modules under test, with `old` replaced by `new` in one function.

    Args:
        module: short name, a key of MODULES.
        function: qualified name inside the module, such as `ppo_clip` or `Pool.pick`.
        old: source of an expression or statement that occurs exactly once in the function.
        new: source that replaces it.

    The modules that the rest of the process uses stay unchanged.
    """
    names = set(MODULES.values()) | {PACKAGE}
    saved = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = _MutatingFinder(MODULES[module], function, old, new)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        return real_modules()
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in names:
            sys.modules.pop(name, None)
        _restore(saved)


def _restore(saved: dict[str, ModuleType]) -> None:
    """Put the original modules back, also as attributes of their packages."""
    sys.modules.update(saved)
    for full_name, module in saved.items():
        parent, _, name = full_name.rpartition(".")
        setattr(sys.modules[parent], name, module)


class _MutatingFinder:
    """Import hook: loads the module `full_name` through a _MutatingLoader."""

    def __init__(self, full_name: str, function: str, old: str, new: str) -> None:
        self.full_name = full_name
        self.replacement = (function, old, new)

    def find_spec(self, full_name: str, path, target: ModuleType | None = None):
        if full_name != self.full_name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(full_name, path)
        assert spec is not None and spec.origin is not None
        loader = _MutatingLoader(full_name, spec.origin)
        loader.replacement = self.replacement
        return importlib.machinery.ModuleSpec(full_name, loader, origin=spec.origin)


class _MutatingLoader(importlib.machinery.SourceFileLoader):
    replacement = ("", "", "")

    def get_code(self, fullname: str):
        tree = ast.parse(self.get_data(self.get_filename(fullname)))
        mutate(tree, *self.replacement)
        return compile(tree, f"<mutated {fullname}>", "exec")


def mutate(tree: ast.Module, function: str, old: str, new: str) -> None:
    """Replace the one node of `function` that equals `old` by `new`, in place."""
    replacer = _Replacer(_parse(old), _parse(new))
    replacer.visit(_find_function(tree, function))
    count = replacer.count
    assert count == 1, f"{function} contains {old!r} {count} times; a mutation needs exactly one"
    ast.fix_missing_locations(tree)


def _parse(source: str) -> ast.AST:
    """The syntax tree of one expression or one statement."""
    (statement,) = ast.parse(source).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _find_function(tree: ast.AST, function: str) -> ast.AST:
    node = tree
    for name in function.split("."):
        inside = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == name
        ]
        assert len(inside) == 1, f"{function}: {len(inside)} definitions of {name}"
        node = inside[0]
    return node


class _Replacer(ast.NodeTransformer):
    """Replaces every node that equals `old` and counts them."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = ast.dump(old)
        self.new = new
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) == self.old:
            self.count += 1
            is_statement = isinstance(node, ast.stmt) and isinstance(self.new, ast.expr)
            return ast.Expr(self.new) if is_statement else self.new
        return self.generic_visit(node)
