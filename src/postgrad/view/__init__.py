"""The web page over run folders, and the same pictures without a browser.

Owns everything that is only looked at: it reads run and evaluation folders, writes nothing into them, and imports neither torch
nor the rooms that wrote the files. `assets/` is the page: plain ES modules, one stylesheet, no build step, nothing from elsewhere.
"""
