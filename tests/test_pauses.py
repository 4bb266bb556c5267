"""No test synchronizes by a fixed pause: a busy machine outlasts it. See tests/waiting.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Tests whose pause may be too short or too long without a change of their result.
ALLOWED = {
    "view/test_browser.py::test_screenshots": "a person looks at them; charts take a moment",
    "cli/test_serve_load.py::test_a_client_that_was_connected_is_answered_when_the_server_stops": (
        "before or after the server has seen the signal, the client gets an answer"
    ),
    "sandbox/test_sandbox_server.py::test_a_client_that_disconnects_frees_its_place": (
        "before or after the program has started, its place becomes free"
    ),
    "training/test_resume.py::test_kill_9_at_any_moment": "the kill may come at any moment",
    "training/test_trackers.py::test_tensorboard_shows_steps_once_after_a_kill_before_the_first_"
    "checkpoint": "TensorBoard names files by the second",
    "processes/test_supervisor.py::test_children_end_when_the_parent_is_killed": (
        "children that are still idle have to end too"
    ),
    "verifiers/test_verifier_pool.py::test_busy_children_end_when_the_parent_is_killed": (
        "children that do not work yet have to end too"
    ),
    "view/test_browser.py::test_hostile_text_is_never_run": (
        "a script that runs later is missed, but nothing fails without one"
    ),
}


def pauses(node: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls of sleep, without those of inner functions and of `while` loops."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda | ast.While):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func) in ("time.sleep", "sleep"):
            yield child
        yield from pauses(child)


@pytest.mark.slow
def test_no_test_waits_by_a_fixed_pause():
    found = set()
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and any(pauses(node)):
                found.add(f"{file.relative_to(TESTS)}::{node.name}")
    assert found == set(ALLOWED), "use waiting.wait_for, or say in ALLOWED why a pause is right"
