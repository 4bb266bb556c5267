"""Engines: what turns prompts into trajectories. The port is engine.py; native/ samples from the trainer's own weights.

May touch model, types, errors and config.
"""
