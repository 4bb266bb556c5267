"""`python -m postgrad.launch.wait ADDRESS GPUS`: waits until a Ray cluster has so many GPUs."""

import logging
import sys
import time

from postgrad.errors import first_line

LIMIT_S = 900.0


def main() -> int:
    import ray

    address = sys.argv[1]
    wanted = float(sys.argv[2])
    deadline = time.monotonic() + LIMIT_S
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            found = ray.cluster_resources().get("GPU", 0.0)
        except Exception as error:  # the head is still starting
            reason = first_line(error)
        else:
            if found >= wanted:
                return 0
            reason = f"{found:g} of {wanted:g} GPUs"
            print(f"waiting for the nodes: {reason}", flush=True)
        time.sleep(5)
    print(f"the nodes did not come within {LIMIT_S:g} s: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
