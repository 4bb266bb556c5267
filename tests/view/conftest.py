"""Fixtures of the page's tests; view_world.py makes them."""

from view_world import runs as runs
from view_world import server as server
