"""docs/read-the-code.md leads through functions that exist, and the way stays short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP = re.compile(r"^### \d+\. `(.+)`\n\n(.+)$", re.MULTILINE)
FUNCTION = re.compile(r"`([\w.]+)` \((\d+) lines\)")


def num_lines(file: Path, name: str) -> int:
    """Return the lines of a function, given as name or Class.name."""
    node: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        (node,) = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == part]
    assert isinstance(node, ast.FunctionDef)
    return (node.end_lineno or 0) - node.lineno + 1


def test_the_way_to_the_loss_and_back_is_short():
    stops = STOP.findall((ROOT / "docs" / "read-the-code.md").read_text())
    assert len({file for file, _ in stops}) <= 12
    total = 0
    for file, functions in stops:
        named = FUNCTION.findall(functions)
        assert named, file
        for name, stated in named:
            lines = num_lines(ROOT / "src" / "postgrad" / file, name)
            assert abs(lines - int(stated)) <= 5, f"{file}: {name} has {lines} lines"
            total += lines
    names = re.findall(r"`([\w.]+)` \(", " ".join(functions for _, functions in stops))
    assert {"train", "Driver.step", "PolicyObjective.loss"} <= set(names)
    assert total <= 1000
