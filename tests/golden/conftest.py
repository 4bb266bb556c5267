"""Lets the golden tests import the helpers of tests/data."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data"))
