"""A verifier whose module takes its time to load, and that takes a little for each response."""

import time

time.sleep(0.8)


def short_nap(response, problem):
    time.sleep(0.05)
    return 1.0
