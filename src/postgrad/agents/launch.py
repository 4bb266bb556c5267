"""Runs a command and ends with it; kills it, and all that it started, when the run is gone.

    python launch.py RUN_PID COMMAND...

Imports the standard library only, so that it starts fast.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Run the command; exit with its exit code, or 127 if it cannot be started."""
    run_pid = int(sys.argv[1])
    threading.Thread(target=exit_with_run, args=(run_pid,), daemon=True).start()
    try:
        process = subprocess.Popen(sys.argv[2:])
    except OSError as error:
        print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)


def exit_with_run(run_pid: int) -> None:
    """Kill the process group once the run is gone."""
    while os.getppid() == run_pid:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
