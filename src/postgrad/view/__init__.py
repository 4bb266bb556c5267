"""The web page over run folders, and the same charts as image files.

Owns everything that only displays runs. Reads run and evaluation folders and writes nothing into
them. Imports no torch; from other folders it uses errors, net, and evaluation's comparison of two
evaluations. `assets/` is the page: plain ES modules and one stylesheet, no build step, no files
from other hosts.
"""

FIRST_PORT = 8765
# Ports that the page tries in this order; 0 is any free one.
PORTS = (*range(FIRST_PORT, FIRST_PORT + 20), 0)
