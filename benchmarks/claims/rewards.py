"""Verifiers of the claims: `reward.verifier=benchmarks/claims/rewards.py:NAME`."""

import re


def boxed_sum(response: str, problem: object) -> dict[str, float]:
    """Return 1 for the right sum in the last box plus 0.1 for any box, as the TRL script does."""
    boxes = re.findall(r"boxed\{([^}]*)\}", response)
    right = float(bool(boxes) and boxes[-1].strip() == str(problem.ground_truth))  # type: ignore[attr-defined]
    boxed = float(bool(boxes) and bool(boxes[-1].strip()))
    return {"score": right + 0.1 * boxed, "right": right, "boxed": boxed}


def right_sum(response: str, problem: object) -> dict[str, float]:
    """Return 1 for the right sum in the last box, and nothing for a box alone."""
    parts = boxed_sum(response, problem)
    return parts | {"score": parts["right"]}


def share_of_digits(response: str, problem: object) -> dict[str, float]:
    """Return the share of digits: what the random responses of a smoke test differ in."""
    share = sum(map(str.isdigit, response)) / max(1, len(response))
    return {"score": share, "right": share, "boxed": share}


def verl_gsm8k(response: str, problem: object) -> float:
    """Return verl's strict score of GSM8K: it reads the last 300 characters, compares strings."""
    found = re.findall(r"#### (\-?[0-9.,]+)", response[-300:])
    truth = str(problem.ground_truth)  # type: ignore[attr-defined]
    return float(bool(found) and found[-1].replace(",", "") == truth)
