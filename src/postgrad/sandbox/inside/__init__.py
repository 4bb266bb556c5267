"""What runs inside the sandbox, with the standard library only: program.py is the judged side, tests.py the judging one.

The two run in two sandboxes and share one socket (wire.py). The program never sees a test or an expected value: it is asked to call
its functions with arguments and answers with values; the tests compare those values elsewhere. So there is nothing in its process
that could be patched, printed or exited with to look right. These files import nothing else of ours: only this folder is mounted.
"""
