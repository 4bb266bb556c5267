"""Rows and a reward that the tests of the Python API share."""

from typing import Any

ROWS = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(4) for b in range(4)]


def odd(response: str, problem: Any) -> float:
    """A dense reward: the share of odd digits."""
    return sum(character in "13579" for character in response) / 4 + 0.01 * len(response)
