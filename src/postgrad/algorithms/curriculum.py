"""Curricula: how often a problem is drawn, from how often it was solved.

A problem of which s of the responses are right gives a group with a difference to learn from only
if s is neither 0 nor 1. The variance of a right-or-wrong reward is s · (1 - s).
"""


def draw_probability(solve_rate: float, floor: float) -> float:
    """The probability that a problem is drawn when its turn comes.

    probability = max(floor, 4 · s · (1 - s))

    It is 1 for a problem that is solved half of the time, and `floor` for one that is always or
    never solved.
    """
    return max(floor, 4.0 * solve_rate * (1.0 - solve_rate))


def updated_rate(old: float | None, new: float, memory: float) -> float:
    """The running solve rate of a problem; `memory` is the weight of the old one.

    rate = memory · old + (1 - memory) · new, and new at the first visit
    """
    return new if old is None else memory * old + (1.0 - memory) * new
