"""Training: the driver and everything a run writes.

Owns the run folder (config.yaml, metrics, rollouts, checkpoints, events) and the terminal output.
driver.py calls the stages in order; setup.py opens a run; prepare.py checks the inputs before it.
May import cluster, methods and every layer below them.
"""
