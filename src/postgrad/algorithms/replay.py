"""ExGRPO's draw of problems to replay: weights of buckets and a weighted draw without replacement.

A bucket holds the problems with the same number of successes in their last group.
"""

import math
from collections.abc import Callable, Mapping, Sequence

BUCKET_WEIGHTS = ("normal", "linear", "sqrt", "linear_clip", "none")


def bucket_weight(kind: str, successes: int, samples: int) -> float:
    """The weight of the bucket of problems that had `successes` of `samples`; only ratios between buckets matter.

    normal       exp(-(successes - samples / 2)^2 / 2): problems solved half of the time come most
    linear       successes / samples
    sqrt         sqrt(successes / samples)
    linear_clip  min(successes / samples, 1 / 2)
    """
    share = successes / samples
    if kind == "normal":
        return math.exp(-((successes - samples / 2) ** 2) / 2)
    return {"linear": share, "sqrt": math.sqrt(share), "linear_clip": min(share, 0.5)}[kind]


def draw_from_buckets(
    buckets: Mapping[int, Sequence[str]],
    weights: Mapping[int, float],
    num: int,
    uniform: Callable[[], float],
) -> list[str]:
    """`num` different names (fewer when there are not as many): first a bucket by weight, whatever its size, then one of it, all alike.

    A bucket that is used up leaves the draw. Its share then falls to the others by their weights, which has the distribution of
    multinomial counts whose excess over a bucket's size is drawn again. `uniform` gives numbers of [0, 1).
    """
    left = {key: list(names) for key, names in sorted(buckets.items()) if names}
    drawn: list[str] = []
    while left and len(drawn) < num:
        keys, point = list(left), uniform() * sum(weights[key] for key in left)
        while (
            len(keys) > 1 and point >= weights[keys[0]]
        ):  # the last one also takes what rounding leaves over
            point -= weights[keys.pop(0)]
        names = left[keys[0]]
        drawn.append(names.pop(int(uniform() * len(names))))
        if not names:
            del left[keys[0]]
    return drawn
