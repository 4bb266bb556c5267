"""The mathematics: advantages, losses, aggregation, KL, corrections, as pure functions over flat columns.

Imports torch and nothing of ours but types. Every function has hand-computed numbers in its tests.
"""
