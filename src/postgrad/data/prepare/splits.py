"""Which problems belong to a split, where no file of a data set says so. sets.yaml names these.

Each function takes the questions in order, the group of each question, the options and the split;
it returns the indices of the questions in the split.
"""

import hashlib
from typing import Any

SHARES = {"train": (0.0, 0.8), "dev": (0.8, 0.9), "test": (0.9, 1.0)}
MAX_DEV = 200  # problems  # problems


def hold_out(keys: list[str], groups: list[str], options: dict[str, Any], split: str) -> set[int]:
    """Split MATH's training rows: `held_out` rows per category are `eval`, the others `train`."""
    if split == "test":
        return set(range(len(keys)))
    held: set[int] = set()
    for group in sorted(set(groups)):
        held |= set(seeded_order(keys, groups, group, options["seed"])[: options["held_out"]])
    return held if split == "eval" else set(range(len(keys))) - held


def by_subject(keys: list[str], groups: list[str], options: dict[str, Any], split: str) -> set[int]:
    """Split each subject 80/10/10 by the seed; dev keeps its first 200 problems in file order."""
    low, high = SHARES[split]
    selected: set[int] = set()
    for group in sorted(set(groups)):
        order = seeded_order(keys, groups, group, options["seed"])
        selected |= set(order[round(low * len(order)) : round(high * len(order))])
    return set(sorted(selected)[:MAX_DEV]) if split == "dev" else selected


def highest_pass_rates(
    keys: list[str], groups: list[str], options: dict[str, Any], split: str
) -> set[int]:
    """Return the `top` rows of the highest pass rates, in file order among equals.

    500 are `eval`.
    """
    order = sorted(range(len(keys)), key=lambda i: -float(groups[i]))[: options["top"]]
    return _split_off(order, keys, options, split)


def hold_out_500(
    keys: list[str], groups: list[str], options: dict[str, Any], split: str
) -> set[int]:
    """All rows but 500 are `train`; those 500, chosen by the seed, are `eval`."""
    return _split_off(list(range(len(keys))), keys, options, split)


def _split_off(order: list[int], keys: list[str], options: dict[str, Any], split: str) -> set[int]:
    chosen = [keys[i] for i in order]
    shuffled = seeded_order(chosen, ["all"] * len(chosen), "all", options["seed"])
    held = {order[i] for i in shuffled[: options["held_out"]]}
    return held if split == "eval" else set(order) - held


def seeded_order(keys: list[str], groups: list[str], group: str, seed: int) -> list[int]:
    """Return indices of a group's problems, shuffled by the seed and their texts only."""
    members = [i for i, name in enumerate(groups) if name == group]

    def sort_key(i: int) -> bytes:
        text = f"{seed}:{keys[i]}".encode()
        return hashlib.blake2b(text, digest_size=8, person=b"divide").digest()

    return sorted(members, key=sort_key)
