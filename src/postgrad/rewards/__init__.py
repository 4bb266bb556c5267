"""Verifiers: judge one response against one problem, a Score with named parts or a typed Failure, never a silent zero.

May touch types, errors and config. Untrusted or slow judging runs in killable child processes (pool.py).
"""
