"""Running untrusted programs: locally under bubblewrap, or on a sandbox server over HTTP.

Imports no torch and nothing of ours except errors and web.
"""
