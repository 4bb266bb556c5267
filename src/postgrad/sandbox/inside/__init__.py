"""Code that runs inside the sandbox, with the standard library only.

- program_runner.py: runs the program under test.
- test_runner.py: runs the tests, in a second sandbox. It knows the program by its replies only.
- channel.py: the socket between the two, as JSON lines.
- plain.py: plain values as JSON, rebuilt on the other side.
- handles.py: what a test holds instead of an object of the program.
- test_names.py: what the names in a test mean.
- test_source.py: what a test's source says about the names that it uses.
- single_sandbox.py: both runners in one sandbox, for a Sandbox Fusion server.
- limits.py: resource limits.

Why two sandboxes: whatever the program patches, prints or exits with, it happens in another process
than the test. The program never sees a test or an expected value. A test gets plain values of
exactly the built-in types, and handles; no operator of a program's object decides an assert, unless
the test itself uses the class of that object (handles.py has the rules).

These files import nothing else of ours: only this folder is mounted. They must run on Python 3.10.
"""
