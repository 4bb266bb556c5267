"""`postgrad doctor`: what this machine offers, and whether a run fits and how long it takes.

machine.py describes the machine. fit.py estimates the memory and the disk of a run, rehearsal.py
measures two of its steps, and report.py holds the rows. May import training and every layer below.
"""
