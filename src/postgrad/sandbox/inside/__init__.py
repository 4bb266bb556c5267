"""Code that runs inside the sandbox, with the standard library only.

Two processes, each in a sandbox of its own. `program_runner` holds the program and its objects;
`test_runner` holds the tests and decides. Between them is one socket with JSON lines (`channel`).

- To the program go: "call", "getattr", "setattr", "next" ... on an object that it has handed out,
  with plain values, names of Python's own functions, and numbers of the test's own functions as
  arguments. No text of a test, no expected value, no class of a test.
- To the test come: plain values, rebuilt from JSON by exactly their built-in types (`plain`);
  numbers for everything else (`handles`); and that something was raised.
- A number is opaque. Its attributes and calls are requests to the program. It has an identity and
  no operators. An attribute that plain values have too (`count`, `startswith`) cannot be called,
  except on an instance of a class that the test itself has called.
- A test that uses an object for more is unsupported if it names a class of the program, as
  `Stack()`; otherwise it expects plain values, and it fails.
- An exception of the program fails the test, unless the test demands it (`test_source`). The end
  of an iterator is a fact and no exception.
- The program may call the test's own functions that it got as arguments, with plain values.
- `lengths`: a test that a result of no items would pass.

`test_names`: what the names in a test mean. `single_sandbox`: both runners in one sandbox, for
a Sandbox Fusion server. `limits`: resource limits. Only this folder is mounted, so these files
import nothing else of ours. They must run on Python 3.10.
"""
