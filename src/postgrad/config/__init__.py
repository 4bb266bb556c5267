"""Configuration: typed dataclasses (schema.py), Hydra composition (compose.py) and the recipes (recipes/*.yaml).

Owns every setting of the package but a method's own. Imports no torch and nothing of ours but errors.
"""
