"""ExGRPO's draw of problems to replay: weights of buckets and a weighted draw without replacement.

A bucket holds the problems with the same number of successes in their last group.
"""

import math
from collections.abc import Callable, Mapping, Sequence

BUCKET_WEIGHTS = ("normal", "linear", "sqrt", "linear_clip", "none")


def bucket_weight(kind: str, successes: int, samples: int) -> float:
    """Return the weight of the bucket of problems with `successes` among `samples` responses.

        normal       exp(-(successes - samples / 2)^2 / 2), largest at half of the samples
        linear       successes / samples
        sqrt         sqrt(successes / samples)
        linear_clip  min(successes / samples, 1 / 2)

    Only ratios between buckets matter.
    """
    share = successes / samples
    if kind == "normal":
        return math.exp(-((successes - samples / 2) ** 2) / 2)
    weights = {"linear": share, "sqrt": math.sqrt(share), "linear_clip": min(share, 0.5)}
    return weights[kind]


def draw_from_buckets(
    buckets: Mapping[int, Sequence[str]],
    weights: Mapping[int, float],
    num: int,
    uniform: Callable[[], float],
) -> list[str]:
    """Draws `num` different names, or all if there are fewer: a bucket by weight, then a name.

    A bucket's chance depends on its weight, not on its size. Names within a bucket are equally
    likely. An empty bucket leaves the draw, and its share goes to the others by their weights.

    Args:
        buckets: names by bucket.
        weights: the weight of each bucket.
        uniform: returns the next random number in [0, 1).
    """
    remaining = {key: list(names) for key, names in sorted(buckets.items()) if names}
    drawn: list[str] = []
    while remaining and len(drawn) < num:
        key = _draw_bucket(list(remaining), weights, uniform())
        names = remaining[key]
        drawn.append(names.pop(int(uniform() * len(names))))
        if not names:
            del remaining[key]
    return drawn


def _draw_bucket(keys: list[int], weights: Mapping[int, float], uniform: float) -> int:
    """Return the key whose interval of the summed weights contains `uniform` times the sum."""
    point = uniform * sum(weights[key] for key in keys)
    for key in keys[:-1]:
        if point < weights[key]:
            return key
        point -= weights[key]
    return keys[-1]  # also for what rounding leaves over
