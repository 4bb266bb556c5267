"""Both sides in one sandbox, for a server that runs one program a request: this process judges, a child of it has the program.

Standard input: JSON with the limits (`settings`), the `program` and what tests.py wants (`given`). The verdicts are printed. The
child has no way to print, and no test reaches it; but the walls between the two are only those between two processes.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from . import tests

FOLDER = str(Path(__file__).parent.parent)
CHILD = f"import sys; sys.path.insert(0, {FOLDER!r}); from inside import program; sys.path.pop(0); program.main()"

STACK = 16 << 20  # Fusion lets it be as large as all the memory, and then no thread fits


def main() -> None:
    message = json.load(sys.stdin)
    verdicts = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)  # for the verdicts alone, whatever a test prints
    judging, judged = socket.socketpair()
    source, given = (
        filled(message["program"].encode("utf-8", "surrogatepass")),
        filled(json.dumps(message["given"]).encode()),
    )
    ready, ready_theirs = os.pipe()
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(
        resource.RLIMIT_STACK, (STACK if most == resource.RLIM_INFINITY else min(STACK, most), most)
    )
    theirs = {"program": source.fileno(), "ready": ready_theirs, "peer": judged.fileno()}
    words = [sys.executable, "-I", "-B", "-c", CHILD, json.dumps(message["settings"] | theirs)]
    child = subprocess.Popen(
        words, pass_fds=list(theirs.values()), stdin=nowhere, stdout=nowhere, stderr=nowhere
    )

    def end(*_: Any) -> None:  # at the alarm of tests.py; the child would stay behind
        child.kill()
        child.wait()
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    judged.close()
    os.close(ready_theirs)
    if os.read(ready, 1) != b"r":
        sys.exit("the program's interpreter did not start")
    ours: dict[str, Any] = {"tests": given.fileno(), "control": verdicts, "peer": judging.fileno()}
    sys.argv[1:] = [json.dumps(message["settings"] | ours)]
    try:
        tests.main()
    finally:
        child.kill()
        child.wait()


def filled(content: bytes) -> IO[bytes]:
    """A file without a name, to be read from its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this process)
    file.write(content)
    file.seek(0)
    return file
