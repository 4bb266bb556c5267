"""What this machine has, what a run will use, and whether the run fits in memory and time.

Owns `postgrad doctor`. May import training and everything below it.
"""
