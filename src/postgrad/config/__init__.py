"""Configuration: dataclasses (schema.py), from recipes and overrides (compose.py, recipes/*.yaml).

Owns every setting of the package except those of the methods. Imports no torch, and nothing of
ours except errors.
"""
