"""Verifiers: judge one response against one problem, a Score with named parts or a typed Failure, never a silent zero.

verifier.py is the port and the table of names, answers.py and equal.py judge by text and number, math.py by algebra, pool.py and
child.py run what is slow or could be attacked in killable child processes, judge.py asks a language model, score.py has the Judge
that the score stage uses.
May touch problem, errors and config; imports no torch, so that a child starts fast.
"""
