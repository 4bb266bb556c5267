"""Running untrusted programs: on this machine under bubblewrap, or on a server over HTTP.

- local.py: Sandbox, which runs and tests programs under bubblewrap, and the probe that proves it.
- bubblewrap.py, seccomp.py: bubblewrap's arguments and the filter for system calls.
- inside/: the code that runs inside the sandbox.
- outcome.py: limits, how a program ended, the result of one test.
- suites.py: the tests of one program, one after the other; the same rules for every sandbox.
- remote.py: sandboxes of other machines.
- server.py, request_models.py: `postgrad sandbox`, the sandbox as a server.

Imports no torch, and of Postgrad only errors and net.
"""
