"""A verifier whose module takes 1.2 s to import and that takes 0.1 s per response."""

import sys
import time

if "pytest" not in sys.modules:  # in the child process
    time.sleep(1.2)


def short_nap(response, problem):
    time.sleep(0.1)
    return 1.0
