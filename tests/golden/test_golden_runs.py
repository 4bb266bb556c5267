"""Two steps of every method sample the tokens and compute the numbers that were recorded.

After a change on purpose: python tests/golden/record.py runs, and read the diff.
"""

import pytest
from core_recipes import CORE_RECIPES
from runs import CASES, differences, read, run_case

from postgrad.methods import METHODS

AGAIN = "if this is meant: python tests/golden/record.py runs"
FAST = ("grpo", "sft")


def test_every_method_has_a_case():
    assert {*METHODS} <= {*CASES} and {*FAST} <= {*CORE_RECIPES}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_run_gives_the_recorded_numbers(name, tiny, tmp_path):
    recorded, found = read(name), list(run_case(name, tiny, tmp_path))
    assert recorded and len(recorded) == len(found), AGAIN
    changed = [one for old, new in zip(recorded, found, strict=True) for one in changes(old, new)]
    assert not changed, "\n".join([f"{len(changed)} numbers differ", *changed[:10], AGAIN])


def changes(old, new):
    return differences(old, new, f"{old[0]} {old[2]}")


def test_a_difference_above_the_tolerance_is_found():
    step = ["step", "grpo", 1, [0.5, 2.0], [["3 4", 0.1, None, -2.0]]]
    assert not differences(step, ["step", "grpo", 1, [0.500001, 2.0], [["3 4", 0.1, None, -2.0]]])
    assert differences(step, ["step", "grpo", 1, [0.5001, 2.0], [["3 4", 0.1, None, -2.0]]])
    assert differences(step, ["step", "grpo", 1, [0.5, 2.0], [["3 5", 0.1, None, -2.0]]])
    assert differences(step, ["step", "grpo", 1, [0.5, 2.0], [["3 4", 0.1, 0.0, -2.0]]])
    tensor = [0.5, 2e-4, 0.0, 1e-4]  # norm, sum, first, last
    assert not differences(tensor, [0.5, 2e-4, 5e-6, 1e-4])
    assert differences(tensor, [0.5, 2e-4, 2e-5, 1e-4])
