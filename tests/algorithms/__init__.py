"""Tests of postgrad.algorithms.

vectors_* files have checks with hand-computed numbers; test_mutations shows that they can fail.
"""
