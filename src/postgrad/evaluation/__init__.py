"""Evaluation of a model on problems: greedy and sampled accuracy, with everything that was judged."""
