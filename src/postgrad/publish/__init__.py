"""Model folders for others: export, push, model cards, checkpoints of other systems.

May import training and model.
"""
