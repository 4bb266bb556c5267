"""No import cycles between the files of src/postgrad, and how many of them a run loads.

Imports inside functions and under TYPE_CHECKING count for cycles too.
"""

import ast
import subprocess
import sys
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


# What the driver needs of none of its runs: servers, and what verifies and judges.
SERVERS = {"httpx", "pydantic", "starlette", "uvicorn"}
LOADED = "import sys; print(*{name for name in sys.modules})"
TOY = ["model.path=tiny", "data.train=arithmetic:1", "data.template=plain", "model.device=cpu"]
TOY += ["model.dtype=float32", "model.threads=1", "training.steps=1", "name=toy"]
TOY += ["training.problems_per_step=2", "rollout.samples=2", "rollout.max_response_tokens=4"]
RUN = """
import sys
from postgrad.cli.train import compose_arguments
from postgrad.training.driver import train
from postgrad.training.report import Reporter

train(compose_arguments(sys.argv[1:]), Reporter())
"""


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after it ran the code."""
    command = [sys.executable, "-c", code + "\n" + LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def ours(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.split(".")[0] == "postgrad")


def within(modules: set[str], *places: str) -> set[str]:
    return {name for name in modules if name.startswith(tuple(f"postgrad.{p}" for p in places))}


OTHERS = ("agents", "serving", "sandbox", "view")


def test_the_driver_loads_ports_and_no_implementations():
    """Measured: 100. Engines, models, readers, verifiers and judges wait for a setting."""
    modules = loaded_by("import postgrad.training.driver")
    assert len(ours(modules)) <= 95, ours(modules)
    assert not modules & {*SERVERS, "sympy"}
    assert not within(modules, *OTHERS, "judge.llm", "rollout.native", "model.policy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "most"), [pytest.param("sft", 195, marks=pytest.mark.nightly), ("grpo", 215)]
)
def test_a_run_loads_what_its_settings_name(recipe, most, tmp_path):
    """Measured: 188 with SFT, 209 with GRPO."""
    toy = [word for word in TOY if recipe == "grpo" or not word.startswith("rollout.")]
    modules = loaded_by(RUN, recipe, *toy, f"runs={tmp_path}")
    assert len(ours(modules)) <= most, ours(modules)
    assert not modules & SERVERS
    assert not within(modules, *OTHERS, "rollout.http", "model.scored", "sizing.choose")
