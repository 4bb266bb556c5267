"""Fixtures of the tests of the sandbox."""

import pytest

from postgrad.sandbox.local import Sandbox


@pytest.fixture(scope="module")
def box() -> Sandbox:
    from sandbox_limits import QUICK

    return Sandbox(QUICK)
