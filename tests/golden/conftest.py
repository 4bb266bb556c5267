"""Lets the golden tests import the helpers of tests/data and tests/methods."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "data"), str(TESTS / "methods")]
