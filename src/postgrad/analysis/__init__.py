"""Analysis of a model's internals: entropy of the internal policies, as numbers and figures.

Owns `postgrad analyze entropy`. May import evaluation, model, data and rollout.
"""
