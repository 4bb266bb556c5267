"""Configuration: dataclasses (schema.py), Hydra composition (compose.py), recipes (recipes/*.yaml).

Owns every setting of the package except those of the methods. Imports no torch, and nothing of
ours except errors.
"""
