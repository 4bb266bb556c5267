"""Each mutation breaks one formula, and the named check with hand-computed numbers must fail.

mutation.py replaces the expression in the syntax tree. A mutation whose expression does not occur
exactly once in its function fails too, so that the table stays in step with the source.
"""

import csv
from pathlib import Path

import pytest

from .mutation import MODULES, Mutation, mutated_modules, real_modules
from .test_vectors import CHECKS

TABLE = Path(__file__).with_name("mutations.tsv")


def read_mutations() -> list[Mutation]:
    """Return the rows of the table of mutations."""
    with TABLE.open(newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Mutation(**row) for row in rows]


MUTATIONS = read_mutations()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")  # broken code may warn
@pytest.mark.parametrize(
    "mutation",
    MUTATIONS,
    ids=[f"{m.module}.{m.function}-{i}" for i, m in enumerate(MUTATIONS)],
)
def test_check_fails_on_mutated_formula(mutation):
    broken = mutated_modules(mutation.module, mutation.function, mutation.old, mutation.new)
    with pytest.raises(AssertionError):
        CHECKS[f"check_{mutation.check}"](broken)


def test_every_module_has_a_mutation():
    assert {mutation.module for mutation in MUTATIONS} == set(MODULES)


def test_mutated_copies_leave_the_real_modules_unchanged():
    before = real_modules()
    unchanged = mutated_modules("losses", "policy_gradient", "-advantages", "-advantages")
    CHECKS["check_policy_gradient"](unchanged)
    assert unchanged.losses is not before.losses
    assert real_modules().losses is before.losses


def test_mutation_of_an_absent_expression_is_refused():
    with pytest.raises(AssertionError, match="0 times"):
        mutated_modules("losses", "ppo_clip", "no_such_name", "0")
