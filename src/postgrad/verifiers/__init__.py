"""Verifiers: judge one response against one problem, a Score with named parts or a typed Failure, never a silent zero.

verifier.py is the port and the table of names, combine.py reads weighted sums of them, answers.py, equal.py and closed.py judge by text
and number, shape.py by form and length, math.py by algebra, code.py by running programs in sandbox.py (walls.py is bubblewrap's side of
it, seccomp.py the filter of calls, inside/ what runs there, outcome.py how it ended, suites.py test after test; sandbox_server.py and
sandbox_client.py take it over HTTP, fusion.py asks a Sandbox Fusion server, sandbox_line.py is the way to both). pool.py and child.py
run what is slow or could be attacked in killable child processes, judge.py asks a language model for a mark, pairwise.py which of two
answers is better, scorer.py has the Scorer that the score stage uses. May touch problem, errors and config; imports no torch, so that a
child starts fast.
"""
