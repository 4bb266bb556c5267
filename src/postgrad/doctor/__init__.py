"""`postgrad doctor`: what this machine offers, and whether a run fits and how long it takes.

machine.py describes the machine. estimate.py combines fit.py (arithmetic), simulate.py (memory of
the model's own code without weights) and probe.py (short measurements). report.py holds the result.
May import training and every layer below it.
"""
