"""`postgrad doctor`: what this machine offers, and whether a run fits and how long it takes.

machine.py describes the machine. estimate.py combines the formulas of `postgrad.sizing` for GPUs
with fit.py (arithmetic) and probe.py (short measurements) for other devices; describe.py writes the
rows, and report.py holds the result. May import training and every layer below it.
"""
