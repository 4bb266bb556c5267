"""Limits and helpers of the tests of the sandbox."""

import textwrap

import pytest

from postgrad.sandbox import local
from postgrad.sandbox.outcome import Limits, SandboxError

try:
    local.probe()
    MISSING = ""
except SandboxError as reason:
    MISSING = str(reason)


needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")


QUICK = Limits(time_s=10.0, memory_mb=256)  # a generous clock: the machine may be busy


def lines(code: str) -> str:
    return textwrap.dedent(code)
