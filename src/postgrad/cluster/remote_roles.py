"""Paths of roles that no process of the run loads: the run's own engine, servers, and fakes."""

from postgrad.methods.ports import LIVE
from postgrad.rollout.served_path import is_served

FAKE = "fake:"  # begins the path of a role that always answers with the text after it


def is_remote_role(path: str) -> bool:
    """Returns whether a role's path is not a model that this run loads."""
    return path == LIVE or path.startswith(FAKE) or is_served(path)
