"""The web page over run folders, and the same pictures without a browser.

Owns everything that is only looked at: it reads run and evaluation folders, writes nothing into them, and imports no torch; of the
other rooms it uses only how two evaluations are compared. `assets/` is the page: plain ES modules, one stylesheet, no build step,
nothing from elsewhere.
"""
