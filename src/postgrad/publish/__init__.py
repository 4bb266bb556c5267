"""Model folders for others: export, push, model cards, checkpoints of verl.

May import training and every layer below it.
"""
