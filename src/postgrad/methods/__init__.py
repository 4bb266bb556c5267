"""Methods: how one algorithm fills the stages of a step. One file each; base.py has the stages they share.

METHODS maps names to classes by dotted path; a user gives the same kind of path. Nothing registers itself at import.
"""
