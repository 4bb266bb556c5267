"""Prints the size of the code: files, lines, functions, dense expressions and settings.

python tools/code_statistics.py          # src/
"""

import ast
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

from postgrad.config.schema import Config
from postgrad.methods import METHODS, find_method

SOURCE = Path(__file__).parents[1] / "src"
MAX_COLUMNS = 100
MAX_LINES = 400


def is_packed(node: ast.AST) -> bool:
    """Whether a node is an assignment of the form `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_dense(node: ast.AST) -> bool:
    """Whether a node is a comprehension with two loops or two conditions."""
    loops = getattr(node, "generators", [])
    return len(loops) + sum(len(loop.ifs) for loop in loops) > 2 or len(loops) > 1


def count_settings(schema: type) -> int:
    """Return the number of settings of a dataclass, those of its sections included."""
    count = 0
    for field in dataclasses.fields(schema):
        nested = field.type if isinstance(field.type, type) else None
        is_section = nested is not None and dataclasses.is_dataclass(nested)
        count += count_settings(nested) if is_section else 1
    return count


def method_settings() -> set[str]:
    """Return the names of the settings of all methods, a shared one once."""
    names: set[str] = set()
    for method in METHODS:
        names.update(field.name for field in dataclasses.fields(find_method(method).Settings))
    return names


def statistics_of(files: list[Path]) -> Iterator[tuple[str, str]]:
    lines = {file: file.read_text().splitlines() for file in files}
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    longest = max(files, key=lambda file: len(lines[file]))
    yield "Python files", str(len(files))
    yield "lines", f"{sum(map(len, lines.values())):,}"
    long_lines = sum(len(line) > MAX_COLUMNS for file in files for line in lines[file])
    yield f"lines over {MAX_COLUMNS} characters", str(long_lines)
    yield "functions", f"{len(functions):,}"
    percentile = lengths[int(0.99 * len(lengths))]
    yield (
        "lines per function, median and 99th percentile",
        (f"{statistics.median(lengths):g}, {percentile}"),
    )
    yield "longest file", f"{len(lines[longest])} lines, {longest.relative_to(SOURCE)}"
    yield f"files over {MAX_LINES} lines", str(sum(len(one) > MAX_LINES for one in lines.values()))
    yield "assignments a, b = x, y", str(sum(map(is_packed, nodes)))
    yield "comprehensions with two loops or two conditions", str(sum(map(is_dense, nodes)))
    settings = count_settings(Config) - 1 + len(method_settings())  # `method` is not a setting
    yield "settings, those of the methods included", str(settings)


def main() -> None:
    for name, value in statistics_of(sorted(SOURCE.rglob("*.py"))):
        print(f"{name:52}{value}")


if __name__ == "__main__":
    main()
