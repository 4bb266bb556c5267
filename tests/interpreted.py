"""Runs programs whose Triton kernels are interpreted on the CPU."""

import importlib.util
import os
from importlib.metadata import version

import preloaded
import pytest
from packaging.version import Version


def run_interpreted(program: str, *arguments: object, warnings: str = "ignore", **env: str) -> str:
    """Return what the program printed, which must begin with "same".

    Skips the test where Triton's interpreter cannot run.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"):
        pytest.skip("the interpreter of Triton before 3.7 does not work with numpy 2.4")
    done = preloaded.run(
        f"import warnings; warnings._processoptions([{warnings!r}])\n{program}",
        *arguments,
        env={**os.environ, "TRITON_INTERPRET": "1", **env},
        interpret=True,
    )
    assert done.stdout.startswith("same"), done.stderr[-3000:]
    return done.stdout
