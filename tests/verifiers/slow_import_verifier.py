"""A verifier whose module takes 2.2 s to import and that takes 0.2 s per response."""

import sys
import time

if "pytest" not in sys.modules:  # in the child process
    time.sleep(2.2)


def short_nap(response, problem):
    time.sleep(0.2)
    return 1.0
