"""LUFFY's prefixes: the share of a demonstration's tokens that a row starts with."""

STRATEGIES = ("random", "linear", "linear_max", "reverse_linear", "fixed")
NUM_WINDOWS = 10
_WINDOWED = ("peak", "steps", "shared")
# The settings method.prefix_NAME that each strategy reads.
READS = {
    "random": ("min", "max", "shared"),
    "fixed": ("min", "max"),
    "linear": ("peak", "steps"),
    "linear_max": _WINDOWED,
    "reverse_linear": _WINDOWED,
}


def prefix_ratio(
    strategy: str,
    uniform: float,
    *,
    step: int = 1,
    copy: int = 0,
    num_copies: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    peak: float = 0.8,
    steps: int = 1000,
) -> float:
    """Return the share of a demonstration's tokens that a row is given.

        random          low + (high - low) · uniform
        fixed           evenly from low to high over the copies of a group; a single copy gets low
        linear          peak · (1 - (step - 1) / steps), 0 from then on
        linear_max      uniform · peak · (10 - i) / 10 in the i-th of ten equal windows of `steps`
        reverse_linear  uniform · peak · (i + 1) / 10; both stay in the last window afterwards

    Args:
        strategy: one of STRATEGIES.
        uniform: a random number in [0, 1); linear and fixed do not read it.
        step: the step of the run, from 1.
        copy: the number of this row, from 0, among the `num_copies` rows with a demonstration.
    """
    steps_done = step - 1
    if strategy == "random":
        return low + (high - low) * uniform
    if strategy == "fixed":
        return low + (high - low) * copy / max(num_copies - 1, 1)
    if strategy == "linear":
        return peak * (1 - min(steps_done / steps, 1.0))
    # Rounded up: a window includes its last step.
    windows_begun = -(-steps_done * NUM_WINDOWS // steps)
    window = min(max(windows_begun - 1, 0), NUM_WINDOWS - 1)
    bound = window + 1 if strategy == "reverse_linear" else NUM_WINDOWS - window
    return uniform * peak * bound / NUM_WINDOWS
