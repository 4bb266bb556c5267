"""No import cycles between the files of src/postgrad.

Imports inside functions and under TYPE_CHECKING count too.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
TESTS = Path(__file__).parent

# Cycles that still have to be removed: this set only shrinks, and must become empty.
KNOWN_CYCLES: set[frozenset[str]] = set()  # none, and it stays so

Graph = dict[str, set[str]]


def find_modules(source: Path) -> dict[str, Path]:
    """Return the files below `source` by module name; a package's name is that of its folder."""
    modules: dict[str, Path] = {}
    for file in sorted(source.rglob("*.py")):
        parts = list(file.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = file
    return modules


def imported_modules(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the project that one file imports anywhere."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                imported.add(submodule if submodule in modules else base)
    return (imported & modules.keys()) - {name}


def import_graph(source: Path) -> Graph:
    modules = find_modules(source)
    return {name: imported_modules(name, file, modules) for name, file in modules.items()}


def find_cycles(graph: Graph) -> set[frozenset[str]]:
    """Return the strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            position = stack.index(module)
            component = frozenset(stack[position:])
            del stack[position:]
            if len(component) > 1:
                cycles.add(component)

    for module in graph:
        if module not in index:
            visit(module)
    return cycles


@pytest.mark.slow
def test_files_import_each_other_without_cycles():
    cycles = find_cycles(import_graph(SOURCE))
    new = [" <-> ".join(sorted(cycle)) for cycle in cycles - KNOWN_CYCLES]
    assert not new, f"import cycles: {'; '.join(new)}"
    removed = [" <-> ".join(sorted(cycle)) for cycle in KNOWN_CYCLES - cycles]
    assert not removed, f"no longer cycles, remove from KNOWN_CYCLES: {'; '.join(removed)}"


def test_cycles_are_found_in_every_form_of_import(tmp_path):
    package = tmp_path / "shop"
    package.mkdir()
    files = {
        "__init__.py": "",
        "a.py": "import shop.b",
        "b.py": "def f():\n    from shop import c",
        "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import f",
        "d.py": "from shop.a import f",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    assert find_cycles(import_graph(tmp_path)) == {frozenset({"shop.a", "shop.b", "shop.c"})}
    (package / "c.py").write_text("")
    assert find_cycles(import_graph(tmp_path)) == set()


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by their names alone, and refuses the second one."""
    files = [path for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    names = Counter(path.name for path in files)
    twice = [str(path.relative_to(TESTS)) for path in files if names[path.name] > 1]
    assert sorted(twice) == []
