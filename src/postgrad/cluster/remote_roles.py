"""Paths of roles that no process of the run loads: the run's own engine, and servers."""

from postgrad.methods.ports import LIVE
from postgrad.rollout.served_path import is_served


def is_remote_role(path: str) -> bool:
    """Returns whether a role's path is not a model that this run loads."""
    return path == LIVE or is_served(path)
