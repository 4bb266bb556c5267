"""Scored responses as rows of a result file, and their metrics.

Validation in training and evaluation share it. May import verifiers and algorithms.

    rows      one line of a result file
    votes     extracts the answer that a response votes for in maj@k
    metrics   avg@k, pass@k, maj@k with confidence intervals
"""
