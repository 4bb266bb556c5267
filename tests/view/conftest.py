"""Fixtures of the page's tests; view_runs.py makes them."""

from view_runs import runs as runs
from view_runs import server as server
