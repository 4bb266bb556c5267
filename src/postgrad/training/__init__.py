"""The driver and what it writes: run folder, metrics, rollouts, checkpoints, the live panel.

driver.py reads like the line of stages. May touch everything below it.
"""
