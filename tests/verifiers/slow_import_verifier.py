"""A verifier whose module takes its time to load, and that takes a little for each response."""

import sys
import time

if "pytest" not in sys.modules:  # in the pool's child
    time.sleep(1.2)


def short_nap(response, problem):
    time.sleep(0.1)
    return 1.0
