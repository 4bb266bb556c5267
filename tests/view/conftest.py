"""Fixtures of the page's tests; what they are made of is in view_world.py."""

from view_world import runs as runs
from view_world import server as server
